"""The report: what runs left on disk, put together as one page, as Markdown and as JSON.

Guarantees: everything shown is read from result files or goldens; nothing is judged, run or rounded into another truth
here. The JSON comes first: page and Markdown print its fields, and each number of the page names the field it came from.
"""
