"""A net as a picture: SVG, PNG, PDF, or Graphviz's dot, laid out by `dot` where it is installed and by us elsewhere.

`graph` makes boxes and edges of a net, `labels` their text and colours, `layered` gives them positions, and `svg`,
`raster` and `dot` write them.

cli and pycaffe import it.
"""

from caffepy.drawing.draw import FORMATS, RANKDIRS, draw_net, render_net

__all__ = ["FORMATS", "RANKDIRS", "draw_net", "render_net"]
