"""The time in which the live page of a large run loads, and its cost; needs Chromium and `headway[browser]`.

files of 10,000 steps ─┐
                       ├─► headway dashboard ─► Chromium: time until the charts are drawn, gaps between frames
server, 1,000 workers ─┘        processor time
"""
