"""What an agent's turn costs a worker, whether tools leave its engine idle, and its endpoint beside `vllm serve`.

turns.py     CPU time of a turn by its parts, at the first turn of an episode and at later ones
tools.py     tokens a second with tools that take their time, and with tools that answer at once
endpoint.py  requests a second and CPU time of a request, of a worker's endpoint and of vLLM's own server
agents.py    the agents that are played, in host processes
engines.py   engines that are simulated; meter.py  CPU time by part; parts.py  what measurements share
"""
