"""Where rows come from: files of several formats, data sets on hubs, and descriptions that lie beside files."""
