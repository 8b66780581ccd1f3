# SPDX-License-Identifier: Apache-2.0
"""The jobs of the helper: prepare (files to shards), encode, decode. See prepare_data.py for the protocol."""
import os
import re
import time

import numpy as np

from . import answers, formats, limits, rollouts, shard, sources
from .encode import Encoder
from .errors import DataError, SampleError
from .formats import Bad, Chat, Text
from .notes import Odd
from .progress import Progress
from .work import WorkerDied, Workers

MARKER = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]")  # what is written as a special token is


class Chunker:
    """A worker's task: the records of a chunk of one source to ids, masks and counts."""

    def __init__(self, encoder, format_name, entry, columns):
        self.encoder, self.format, self.entry, self.columns = encoder, format_name, entry, columns

    def __call__(self, chunk):
        with limits.bounded("rendering and tokenizing"):
            return self._encode(chunk)

    def _encode(self, chunk):
        if chunk[0] == "text":
            empty = chunk[3] <= chunk[2]
            ids = np.zeros(0, np.uint32) if empty else self.encoder.tok.encode([sources.text_of(chunk)])[0]
            return ids, None, np.array([len(ids)]), None, 1, {}
        rows, places = sources.records(chunk)
        samples, at, own, odd = [], [], [], Odd()  # at: the places of the samples' records; own: values of rollouts
        base = 1 if chunk[0] in ("range", "lines", "rows") else 0
        for place, record in rows:
            try:
                convert = answers.convert if self.format in answers.FORMATS else formats.convert
                record = formats.renamed(record, self.columns)
                if self.format == "rollouts":
                    made, values = rollouts.convert(record)
                    own.append(values)
                else:
                    made = convert(record, self.format, self.entry)
            except Bad as e:
                raise SampleError(place - base, str(e)) from None
            except RecursionError:
                raise SampleError(place - base, "nested too deep") from None
            of_text = isinstance(made, Text) or isinstance(getattr(made, "prompt", None), str)
            for f in rollouts.OF_TOKENS if own else ():
                if record.get(f) is not None:
                    odd.add("field:" + f, len(samples), f'"{f}" of a rollout of text has no effect: it is of tokens, whose ids it lacks')
            for f in formats.without_effect(record) if of_text else ():
                odd.add("field:" + f, len(samples), f'"{f}" of a sample has no effect in this format')
            samples += made if isinstance(made, list) else [made]
            at += [place] * (len(made) if isinstance(made, list) else 1)
        try:
            encoded = self.encoder.encode(samples, odd)
        except Bad as e:
            index, message = e.args[0]
            raise SampleError(at[index] - base, message) from None
        if self.format not in answers.FORMATS:
            return self._pack(samples, encoded, at, places, odd, own)
        rendered = any(not isinstance(s.prompt, str) for s in samples)
        return answers.pack(at, encoded, places, self._places(odd, at), rendered)

    @staticmethod
    def _places(odd, at):
        return {k: (text, [at[i] for i in indices]) for k, (text, indices) in odd.found.items()}

    def _pack(self, samples, encoded, at, places, odd, own):
        """Joins the samples of a chunk, without those that have nothing to train."""
        none = np.zeros(0, np.uint32), np.zeros(0, bool)
        ids = [none[0] if e is None else e[0] for e in encoded]
        masks = [none[1] if e is None else np.ones(len(e[0]), bool) if e[1] is None else e[1] for e in encoded]
        cut = [k for k, values in enumerate(own) if values[2] & 1]
        for k in cut:
            ids[k], masks[k] = rollouts.without_end(self.encoder, samples[k], ids[k], masks[k])
        trained = [int(np.count_nonzero(m[1:])) for m in masks]  # nothing predicts the first token
        kept, left = [k for k, t in enumerate(trained) if t], [k for k, t in enumerate(trained) if not t]
        for k in left:
            roles = dict.fromkeys(m["role"] for m in samples[k].messages) if isinstance(samples[k], Chat) else ()
            if encoded[k] is not None and roles and "assistant" not in roles:
                odd.add("roles", k, "no turn of them is trained: their roles are " + ", ".join(f'"{r}"' for r in roles) + ', and the '
                        'turns that are trained have the role "assistant"')
        lengths = np.array([len(ids[k]) for k in kept], dtype=np.int64)
        all_ids = np.concatenate([ids[k] for k in kept]) if kept else none[0]
        all_masks = np.concatenate([masks[k] for k in kept]) if kept else none[1]
        if kept and self.format not in ("input_ids", "requests"):
            self._note_ends(all_ids, all_masks, np.cumsum(lengths) - lengths, kept, odd, cut)
        return all_ids, np.packbits(all_masks), lengths, np.array([at[k] for k in kept], dtype=np.int64), places, {
            "untrained": [at[k] for k in left], "trained": sum(trained), "own": [own[k] for k in kept if own], "odd": self._places(odd, at),
            "rendered": any(isinstance(s, Chat) for s in samples)}

    def _note_ends(self, ids, mask, starts, kept, odd, cut):
        """Notes samples, but those cut off, that train no token that ends a turn, and those of which a turn has nothing but its end
        trained."""
        is_end = self.encoder.is_end
        target = mask.copy()
        target[starts] = False  # nothing predicts it
        ends = target & is_end[np.minimum(ids, len(is_end) - 1)]
        for k in np.flatnonzero(np.add.reduceat(ends, starts) == 0):
            if kept[k] not in cut:
                odd.add("endless", kept[k], "no token that ends a turn is trained")
        begins = np.flatnonzero(target & ~np.concatenate([[False], target[:-1]]))  # of each run of trained tokens
        of = np.searchsorted(starts, begins, side="right") - 1
        hollow = np.add.reduceat(target & ~ends, begins) == 0
        if self.encoder.tok.bytes:  # whose end of text may follow a conversation's last turn, and the end of that, which is bytes
            hollow[1:] &= of[1:] != of[:-1]
        for k in of[hollow]:
            odd.add("hollow", kept[k], "nothing but the end of an answer, or of a text, is trained")


def detect(path, columns):
    """(format, another one that would do, or None), from a file's first record."""
    for chunk, _ in sources.chunks(path):
        if chunk[0] == "objects":
            chunk = ("objects", chunk[1][:1])
        elif chunk[0] == "rows":
            chunk = (*chunk[:2], chunk[2][:1], chunk[3])
        try:
            rows, _ = sources.records(chunk)
        except SampleError as e:
            raise DataError(place(path, e.record + 1, e.column) + f": {e.message}") from None
        if rows:
            try:
                if not isinstance(rows[0][1], dict):
                    raise Bad("a sample must be a JSON object")
                record = formats.renamed(rows[0][1], columns)
                name = formats.detect(record)
                return name, formats.other(record, name)
            except Bad as e:
                raise DataError(f"{where(path, rows[0][0])}: {e}") from None
    raise DataError(f"the data files hold no samples: {path} is empty")


def where(path, at):
    return f"{path}:{at}" if sources.has_lines(path) else f"{path}[{at}]"


def place(path, at, column=None):
    return where(path, at) + (f":{column}" if column and sources.has_lines(path) else "")


def format_of(source):
    """(format, entry of a dataset_info.json, a format that would do as well)."""
    entry = source.get("entry") or {}
    if sources.kind_of(source["path"]) == "plain":
        return "plain text", entry, None
    if entry:
        style = entry.get("formatting", "alpaca")
        if style not in ("alpaca", "sharegpt"):
            raise DataError(f'dataset_info.json: formatting "{style}" is not supported: alpaca or sharegpt')
        for key in ("images", "videos", "audios"):
            if entry.get(key) or (entry.get("columns") or {}).get(key):
                raise DataError(f'dataset_info.json: "{key}" data are not supported')
        if entry.get("ranking"):
            return "preference", entry, None
        return "rated" if (entry.get("columns") or {}).get("kto_tag") else style, entry, None
    name, other = detect(source["path"], source.get("columns")) if source["format"] == "auto" else (source["format"], None)
    return name, entry, other


def open_encoder(job, say):
    """Says what it does, so that the trainer can name it if that ends the process."""
    say({"event": "doing", "what": f"opening the tokenizer of {job.get('model_dir')}"})
    return Encoder(job)


class Preparation:
    def __init__(self, job, say):
        self.job, self.say = job, say
        self.encoder = open_encoder(job, say)
        self.n_processes = max(1, int(job.get("processes") or 1))

    def run(self):
        self.progress = Progress([source["path"] for source in self.job["sources"]])
        for source in self.job["sources"]:
            self.one(source)

    def one(self, source):
        self.say({"event": "doing", "what": f"making tokens of {source['path']}"})
        name, entry, other = format_of(source)
        if name in ("messages", "sharegpt", "alpaca", "prompt_completion", "rollouts", *answers.FORMATS):
            try:
                self.encoder.templates()  # report its errors and find its markers before workers are started
            except DataError:
                if name not in ("prompt_completion", "rollouts", *answers.FORMATS):
                    raise
        writer = shard.ShardWriter(source["out"], self.job["vocab"], int(source["hash"], 16))
        if other:
            writer.notes.add("other", other)
        workers = Workers(self.n_processes, Chunker(self.encoder, name, entry, source.get("columns")))
        try:
            self.stream(source, name, writer, workers, min(filter(None, (entry.get("num_samples"), source.get("most"))), default=None))
        finally:
            workers.close()
            writer.drop()

    def first(self, keep, ids, bits, lengths, at, more):
        """The first samples of a chunk, with what is counted of them and of those left out before the last of them."""
        n = int(lengths[:keep].sum())
        ids, bits, lengths, at = ids[:n], bits[:n], lengths[:keep], at[:keep]
        first = (np.cumsum(lengths) - lengths)[lengths > 0]
        trained = bits.copy()
        trained[first] = False  # nothing predicts the first token
        more = {**more, "trained": int(np.count_nonzero(trained))}
        for key in ("untrained", "equal"):
            more[key] = [p for p in more.get(key, []) if p < at[-1]]
        odd = {k: (text, [p for p in places if p <= at[-1]]) for k, (text, places) in more.get("odd", {}).items()}
        return ids, bits, lengths, at, {**more, "odd": odd}

    def stream(self, source, name, w, workers, limit):
        path, t0, base, first, rendered = source["path"], time.monotonic(), 0, True, False
        size = max(os.path.getsize(path), 1)
        flat, items = name == "plain text", name in answers.FORMATS
        flags = shard.PLAIN_TEXT if flat else shard.ANSWERS if items else shard.ROLLOUTS if name == "rollouts" else 0
        limit = limit and limit * (2 if items else 1)
        lines = sources.has_lines(path)
        if flat and sources.looks_like_json(path):
            w.notes.add("file", "taken as plain text, as its name says, but it begins like JSON: name it .jsonl (an object a line) or "
                        ".json (an array)")
        try:
            for done, (ids, mask, lengths, at, places, more) in workers.map(sources.chunks(path)):
                if len(ids):
                    self.check_ids(path, ids, lengths, at, base)
                bits = np.unpackbits(mask, count=len(ids)).astype(bool) if mask is not None else np.ones(len(ids), bool)
                if flat:
                    if len(ids):
                        w.add(ids, bits, lengths, np.zeros(1), opens=first)
                        first = False
                elif len(ids):
                    if limit and w.n_samples + len(lengths) >= limit:
                        ids, bits, lengths, at, more = self.first(int(limit - w.n_samples), ids, bits, lengths, at, more)
                    if len(lengths):
                        own = np.array(more["own"][:len(lengths)], rollouts.OWN) if flags & shard.ROLLOUTS else None
                        w.add(ids, bits, lengths, at + base, values=() if own is None else rollouts.values(own, lengths))
                if items and len(lengths):  # the length of an item is what a row must hold
                    w.max_len = max(w.max_len, int((lengths[0::2] + lengths[1::2]).max()))
                w.n_equal += len(more.get("equal", []))
                rendered |= more.get("rendered", False)
                w.n_trained += more.get("trained", len(ids))
                for p in more.get("untrained", []):
                    w.n_untrained += 1
                    if len(w.untrained_at) < 3:
                        w.untrained_at.append(where(os.path.basename(path), p + base))
                for key, (text, found) in more.get("odd", {}).items():
                    if found:
                        w.notes.add(key, text, where(path, found[0] + base)[len(path):], len(found))
                refused = more.get("odd", {}).get("refused", ("", []))
                if len(refused[1]) == w.n_untrained > 0 == w.n_samples:  # all that were seen: it is the template
                    raise DataError(f"{where(path, refused[1][0] + base)}: {refused[0]}")
                base += places
                if self.progress.due():
                    self.say({"event": "progress", "path": path, **self.progress.event(done, w)})
                if limit and w.n_samples >= limit:
                    break
        except SampleError as e:
            raise DataError(f"{place(path, base + e.record + (1 if lines else 0), e.column)}: {e.message}") from None
        except WorkerDied as e:
            raise DataError(f"{path}: a process that turned samples into tokens was ended, at the earliest at "
                            f"{where(path, base + (1 if lines else 0))} ({e})", "runtime") from None
        if flat and w.n_tokens:
            w.max_len, w.n_trained = w.n_tokens, w.n_tokens - 1
        w.n_bytes = size
        if not w.n_samples and not w.n_untrained and not w.n_equal:
            raise DataError(f"the data files hold no samples: {path}")
        self.progress.pass_file(w)
        if rendered:
            with limits.bounded("tokenizing the end of a turn"):
                self.note_template(w.notes)
        elif name in ("prompt_completion", *answers.FORMATS):
            w.notes.add("joined", "strings are joined as they stand, without a chat template")
        w.commit(name, shard.LINES if lines else shard.INDICES, flags)
        self.say({"event": "source", "path": path, "format": name, "samples": w.n_samples // (2 if items else 1), "tokens": w.n_tokens,
                  "seconds": time.monotonic() - t0})

    def note_template(self, notes):
        """Notes a template that prints the date, or ends turns with a token at which the model does not stop, or with no token."""
        tok, all_of_it = self.encoder.tok, (self.encoder._templates or {}).values()
        for t in all_of_it:
            if t.dated:
                notes.add("file:date", f"{t.name} may print the date, {self.job.get('date')}: the cache keeps that of the day (set the "
                          "date with SOURCE_DATE_EPOCH)")
                break
        for t in all_of_it if not tok.bytes else ():
            try:
                end = t.markers()[1].strip()
            except DataError:
                continue
            at = tok.t.token_to_id(end) if end else None
            n = len(tok.encode([end])[0]) if MARKER.fullmatch(end) else 1
            if at is None and n > 1:
                notes.add("file:end", f"{t.name} ends turns with {end}, which is no token of the tokenizer, but {n} tokens: the model may "
                          "not learn to stop (add the token, or set data.template to one that fits the tokenizer)")
            elif at is not None and tok.stops and at not in tok.stops:
                notes.add("file:stop", f"{t.name} ends turns with {end} (token {at}), which is not in eos_token_id of "
                          "generation_config.json or config.json: put it there, or what you train will not stop when it is served")

    def check_ids(self, path, ids, lengths, at, base):
        worst = int(ids.argmax())
        if ids[worst] < self.job["vocab"]:
            return
        k = int(np.searchsorted(np.cumsum(lengths), worst, side="right"))
        spot = where(path, int(at[k]) + base) if at is not None else path
        raise DataError(f"{spot}: {self.encoder.beyond(int(ids[worst]))}")


def stops_of(encoder, job):
    """Ids at which generation stops: eos_token_id of the model, or else of its tokenizer; in a conversation also
    the token with which the chat template ends a turn."""
    tok = encoder.tok
    stops = set(tok.stops) or {tok.eos} - {None}
    if job.get("chat") and not tok.bytes:
        try:
            end = encoder.template_for(None).markers()[1].strip()
        except DataError:
            end = ""
        at = tok.t.token_to_id(end) if end else None
        stops |= {at} - {None}
    return stops


def ids_of(e, record, chat):
    """A prompt's ids: of a text, of a text as the user's turn of a conversation (chat), or of a conversation."""
    text = record.get("prompt", record.get("text"))
    messages = record.get("messages", text if isinstance(text, list) else None)
    if messages is None and not isinstance(text, str):
        raise Bad('a prompt is {"prompt": TEXT} or {"messages": [...]}')
    if messages is None and chat:
        messages = [{"role": "user", "content": text}]
    if messages is None:
        ids = e.tok.encode([text])[0]
        return np.concatenate([np.array(e.begun(ids), np.uint32), ids])
    _, r = e.render(formats.chat(messages, record), prompt=True)
    ids = e.tok.encode([r.text])[0]
    return np.concatenate([np.array(e.begun(ids), np.uint32), ids]) if e.tok.bytes else ids


def encode(job, say):
    """Converts prompts to ids; "chat": texts are the user's turn of a conversation."""
    e = open_encoder(job, say)
    chat = job.get("chat")
    say({"event": "doing", "what": "turning prompts into tokens"})
    for k, record in enumerate(job["prompts"]):
        try:
            with limits.bounded("turning a prompt into tokens"):
                ids = ids_of(e, record, chat)
        except Bad as bad:
            place = record.get("place")
            raise DataError(f"{place}: {bad}" if place else str(bad)) from None
        talks = chat or "messages" in record or isinstance(record.get("prompt"), list)
        ends = stops_of(e, {**job, "chat": talks})
        say({"event": "ids", "sample": k, "ids": ids.tolist(), "ends": sorted(int(i) for i in ends)})


def decode(job, say):
    """Says each sample's text in pieces, each trained or not."""
    e = open_encoder(job, say)
    say({"event": "doing", "what": "turning tokens into text"})
    for k, s in enumerate(job["samples"]):
        ids, mask, pieces, text = s["ids"], s["mask"], [], ""
        with limits.bounded("turning tokens into text"):
            for i in range(len(ids)):
                if i + 1 == len(ids) or mask[i + 1] != mask[i]:
                    whole = e.tok.decode(ids[:i + 1])
                    pieces.append([whole[len(text):].replace("\0", "\u2400"), bool(mask[i])])  # a zero would end it for the reader
                    text = whole
        say({"event": "pieces", "sample": k, "pieces": pieces})


JOBS = {"prepare": lambda job, say: Preparation(job, say).run(), "encode": encode, "decode": decode}


def run(job, say):
    JOBS[job["mode"]](job, say)
