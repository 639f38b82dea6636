"""From text to a drafter: conversations, their loss masks, batches.

A file of conversations (`conversations`) is rendered to token ids and a mask of supervised tokens (`rendering`), laid
out in rows of fixed length, and read in batches (`batches`).
"""
