"""The report of a front: one page that opens from disk and loads nothing.

In: a front. Out: `index.html` with the table, the picture, every plan, their differences and the
timeline of the rules, and `front.svg`. `page.js` and `page.css` are written into the page.
"""
