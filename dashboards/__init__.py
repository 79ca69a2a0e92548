"""Grafana dashboards and Prometheus rules: the router's figures by question, and alerts.

boards      the dashboards as data, `boards.yaml`, and grafana/*.json, which are made from it
prometheus  the rules, as Prometheus loads them; docs/RUNBOOKS.md says what to do at each alert
command     copies the committed files into a folder
"""
