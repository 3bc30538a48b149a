"""Reward functions that go wrong, for processes of their own: this module imports nothing heavy."""

import os
import subprocess
import time


def exact(item, text):
    print("what a function prints is no answer")
    return float(text == item["answer"])


def hang_on_every_tenth(item, text):
    if int(item["id"]) % 10 == 0:
        time.sleep(3600)
    return len(text) / 3


def by_word(item, text):
    """Does what the text says."""
    if text == "hang":
        time.sleep(3600)
    if text.startswith(("start ", "leave ")):  # a program, and waits for it or leaves it
        program = subprocess.Popen(["sleep", "3600"])
        with open(f"{text[6:]}.new", "w") as file:
            file.write(f"{os.getpid()} {program.pid}")
        os.rename(file.name, text[6:])
        if text.startswith("start"):
            program.wait()
    if text == "raise":
        raise RuntimeError("no reward today")
    if text == "nan":
        return float("nan")
    if text == "text":
        return "good"
    if text == "die":
        os._exit(3)
    if text.startswith("once "):  # fails the first time
        try:
            os.close(os.open(text[5:], os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return 1.0
        raise RuntimeError("the first time")
    return 0.5
