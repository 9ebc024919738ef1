"""The commands `export` and `import`, thin faces of caffepy.onnx; cli.main finds them by name."""
