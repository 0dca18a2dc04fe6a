"""How do many people share one model while they come and go?

One thread owns the model and takes a step after the other (batch.py). Between two steps requests
join, or leave with their answer, or are dropped: nobody waits for another one's answer. What a
request has read is kept for a while; a later one that begins alike copies these rows of the cache.

Imported by serve.py. Papers: Orca (OSDI 2022); SGLang (arXiv 2312.07104) for the shared beginnings
"""

import os
import queue
import threading

import mlx.core as mx
from tokenizers.decoders import DecodeStream

from examples import batch


class Job:
    """A request. In the engine's thread, deliver(kind, value) gets ("text", some characters) any
    number of times, then ("end", finish reason) or ("error", a sentence) once.
    """

    def __init__(self, sequence, tokenizer, stops, deliver):
        self.sequence = sequence
        self.tokenizer = tokenizer
        self.stops = stops  # texts that end the answer, and are no part of it
        self.deliver = deliver
        self.cancelled = False  # by any thread
        self.shared = 0  # tokens of the prompt that another request has read
        self.decoder = DecodeStream(skip_special_tokens=False)
        self.decoded = 0  # characters that came out of it
        self.held = ""  # characters that may be the beginning of a stop

    def write(self, token_id):
        """Deliver the characters that are whole and begin no stop. True where a stop is reached."""
        text = self.decoder.step(self.tokenizer, token_id) or ""
        self.decoded += len(text)
        return self.send(text, last=False)

    def finish(self, reason):
        """Deliver what was held back, and the end."""
        text = self.tokenizer.decode(self.sequence.answer, skip_special_tokens=False)
        stopped = self.send(text[self.decoded :], last=True)
        self.deliver("end", "stop" if stopped else reason)

    def send(self, text, last):
        text = self.held + text
        found = [text.index(stop) for stop in self.stops if stop in text]
        ready = min(found, default=len(text))
        if not found and not last:
            ready -= unsure(text, self.stops)
        if ready:
            self.deliver("text", text[:ready])
        self.held = "" if found else text[ready:]
        return bool(found)


def unsure(text, stops):
    """The number of characters at the end of the text that may become a stop."""
    longest = 0
    for stop in stops:
        for length in range(1, len(stop)):
            if text.endswith(stop[:length]):
                longest = max(longest, length)
    return longest


class Engine:
    """Takes jobs from any thread. `slots` of them share each step, and `waiting` more can wait."""

    def __init__(self, weights, config, stop, slots, waiting, kept_tokens):
        self.model = weights, config, stop
        self.slots = slots
        self.waiting = queue.Queue(waiting)
        self.running = []
        self.kept = []  # ended sequences, the newest last, for what is in their caches
        self.kept_tokens = kept_tokens
        threading.Thread(target=self.work, daemon=True).start()

    def submit(self, job):
        """queue.Full, at once, where too many wait."""
        self.waiting.put_nowait(job)

    def work(self):
        while True:
            self.admit()
            try:
                self.step()
            except Exception as error:  # it ends these requests, and none that comes later
                for job in self.running:
                    job.deliver("error", f"the engine failed: {error}")
                self.running = []

    def admit(self):
        """Fill the free slots. Where nothing is to be done, wait for the next job."""
        while len(self.running) < self.slots:
            try:
                job = self.waiting.get(block=not self.running)
            except queue.Empty:
                return
            if not job.cancelled:
                self.running.append(job)

    def step(self):
        self.running = [job for job in self.running if not job.cancelled]
        for job in self.running:
            if job.sequence.offset == 0:
                self.share(job)
        moved = batch.advance([job.sequence for job in self.running], *self.model)
        for job in self.running:
            if job.sequence in moved:
                self.report(job)
        self.running = [job for job in self.running if not job.sequence.ended]
        while sum(rows(sequence) for sequence in self.kept) > self.kept_tokens:
            self.kept.pop(0)  # the oldest

    def share(self, job):
        """Begin with a copy of the rows that another sequence has for the same beginning."""
        sequence = job.sequence
        known = self.kept + [other.sequence for other in self.running]
        best = max(known, key=lambda other: common(other, sequence))
        job.shared = common(best, sequence)
        if job.shared > 0:
            sequence.cache = []
            for keys, values in best.cache:
                rows = [mx.contiguous(part[:, : job.shared]) for part in (keys, values)]
                mx.eval(rows)
                sequence.cache.append(rows)
            sequence.offset = job.shared
            sequence.pending = sequence.prompt[job.shared :]

    def report(self, job):
        """Deliver what the step gave to this job."""
        sequence = job.sequence
        if sequence.ended == "error":
            job.deliver("error", sequence.error)
        elif sequence.ended != "stop" and job.write(sequence.answer[-1]):
            sequence.ended = "stop"
            job.deliver("end", "stop")
        elif sequence.ended:
            job.finish(sequence.ended)
        if sequence.ended:
            self.kept.append(sequence)


def rows(sequence):  # that its cache has room for
    return sequence.cache[0][0].shape[1]


def common(known, sequence):
    """How many tokens `sequence` begins with that `known` has in its cache. At least the last token
    of a prompt is fed again, since its logits are not kept.
    """
    tokens = known.prompt + known.answer
    return len(os.path.commonprefix([tokens[: known.offset], sequence.prompt[:-1]]))
