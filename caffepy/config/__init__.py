"""Configuration: reads, upgrades and checks prototxt files of every Caffe version; data and higher layers import it."""
