"""Grafana dashboards as code: what the router's figures answer, by question, and the files that Grafana loads.

content   the panels: `fleet`, `decisions`, made of `panels` and `promql`
render    content to Grafana's JSON; needs grafana-foundation-sdk
files     the committed result; needs nothing
"""
