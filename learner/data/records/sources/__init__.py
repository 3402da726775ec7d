"""Sources of rows: files of several formats, data sets on hubs, and descriptions that lie beside files.

    files.py          JSON, JSON lines, Parquet, Arrow, text, saved directories: told by their first bytes
    hubs.py           `hf:OWNER/NAME`, `modelscope:OWNER/NAME`, one row after the other
    descriptions.py   LLaMA-Factory's `dataset_info.json`: what columns and roles are called

A source yields a row as a dictionary with its place; `layouts/` beside it turns rows into records.

The invariant: every row keeps its place (file and line, or data set and number), so that a refusal can name it.
"""
