"""The Python layer type: loading of the user's class, and the host blobs that its methods receive."""
