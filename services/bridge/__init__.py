"""The bridge process: the way from the bus to one worker's cable and back. It opens nothing that it carries.

    bridge.py       the bridge of the link: pump.py carries residuals, page_pump.py queries and pages, each on a thread
    page_bridge.py  the bridge of a further worker that holds pages: page_pump.py alone

One process a worker. Started by services.launch.
"""
