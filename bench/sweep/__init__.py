"""`router bench sweep` and `router bench report`: one endpoint or many fleets under many loads, and what they gave."""
