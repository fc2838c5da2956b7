"""What the command line's longer commands do. Each is imported when it runs, so that `vexact --help` is quick."""
