"""How fast the live page of a large run loads, and what following it costs; needs Chromium and `headway[browser]`.

files of 10,000 steps ─┐
                       ├─► headway dashboard ─► Chromium: time until the charts are drawn, gaps between frames
server, 1,000 workers ─┘        processor time
"""
