"""The web page of the control plane."""
