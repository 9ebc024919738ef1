"""Pictures of nets by Graphviz: `graph` makes boxes and edges of a net, `draw` writes them.

cli and pycaffe import it.
"""

from caffepy.drawing.draw import FORMATS, RANKDIRS, draw_net, render_net

__all__ = ["FORMATS", "RANKDIRS", "draw_net", "render_net"]
