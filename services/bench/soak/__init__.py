"""Mixed requests under random faults for as long as one likes; what processes hold afterwards is what they held before.

    plan.py      who asks what, and which fault strikes when: all of it from a seed (pure)
    striking.py  faults armed, processes killed, what of it happened
    traffic.py   clients that ask, leave and come again, on threads of their own
    samples.py   what processes hold and what gauges say, again and again; what must be as it was
    drawing.py   the plots of the report
    run.py       put together, and the report

Called by services.cli.soak.
"""
