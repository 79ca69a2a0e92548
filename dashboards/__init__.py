"""Grafana dashboards and Prometheus rules as code: the router's figures by question, alerts, and the files of both.

content   the boards, as `boards` lists them, made of `panels` and `promql`; the rules: `alerts`, `objectives`
render    panels to Grafana's JSON; needs grafana-foundation-sdk. `rules` to Prometheus's YAML
files     the committed result; needs nothing
"""
