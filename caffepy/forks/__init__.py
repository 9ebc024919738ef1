"""Layer types, readers and losses of public forks of Caffe, by family of models.

A net that names a type imports its module. No module below imports one: they register by the functions that users have.
"""
