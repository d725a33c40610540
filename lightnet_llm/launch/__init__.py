"""Starting runs: host files, the launcher's command line, and ready files for clusters."""
