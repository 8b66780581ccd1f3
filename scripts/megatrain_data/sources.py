# SPDX-License-Identifier: Apache-2.0
"""Data files as chunks of about a MiB, and chunks as records. Memory does not grow with the file.

A chunk is a tuple that travels to a worker, with the kind first:
    ("range", path, start, end)     lines of a plain file that begin in [start, end): the worker reads them
    ("lines", bytes)                whole lines, of a compressed file
    ("objects", [text, ...])        elements of a JSON array
    ("rows", header, [(line, fields), ...], lines)  rows of a .csv or .tsv file; lines count from 1 in the chunk
    ("arrow", bytes)                a record batch
    ("text", path, start, end)      plain text
"""
import codecs
import csv
import datetime
import decimal
import functools
import gzip
import io
import json
import os

from . import limits
from .errors import DataError, SampleError

CHUNK = 1 << 20
ROWS = 512  # of a columnar file, in a chunk
TABLES = (".parquet", ".arrow")
SEPARATORS = {"csv": ",", "tsv": "\t"}


def bare_name(path):
    """The path in lower case without .gz or .zst: what a file is does not depend on the case of its extension."""
    path = path.lower()
    for end in (".gz", ".zst"):
        if path.endswith(end):
            return path[:-len(end)]
    return path


def is_compressed(path):
    return len(bare_name(path)) < len(path)


@functools.lru_cache(maxsize=None)
def json_kind(path, kind):
    """"json": an array of samples, or "jsonl": one a line. What a file begins with tells it, whatever its name is."""
    if not os.path.isfile(path):
        return kind
    f, _ = open_binary(path)
    with f:
        try:
            line = b""
            while not line.strip() and (more := f.readline(limits.LINE)):
                line = more.removeprefix(codecs.BOM_UTF8)
        except (OSError, EOFError) as e:
            raise DataError(f"cannot read {path}: {e}") from None
    line = line.strip()
    if line.startswith(b"["):
        return "json"
    return "jsonl" if line.startswith(b"{") and line.endswith(b"}") else kind


def kind_of(path):
    name = bare_name(path)
    for end in (".jsonl", ".ndjson", ".json", ".csv", ".tsv", *TABLES):
        if name.endswith(end):
            kind = {".ndjson": "jsonl"}.get(end, end[1:])
            return json_kind(path, kind) if kind in ("json", "jsonl") else kind
    return "plain"


def check_encoding(path):
    """Names UTF-16, as editors and tables of Windows write it: half of its bytes are zero."""
    f, _ = open_binary(path)
    with f:
        try:
            head = f.read(64)
        except (OSError, EOFError) as e:
            raise DataError(f"cannot read {path}: {e}") from None
    if head[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) or (len(head) > 3 and (not any(head[1::2]) or not any(head[::2]))):
        raise DataError(f"{path} is UTF-16, not UTF-8: convert it, with iconv -f UTF-16 -t UTF-8 for example")


def has_lines(path):
    """Whether the places of samples are lines."""
    return kind_of(path) in ("jsonl", *SEPARATORS)


def looks_like_json(path):
    with open(path, "rb") as f:
        return f.read(4096).removeprefix(codecs.BOM_UTF8).lstrip()[:1] in (b"{", b"[")


def open_binary(path):
    """(file, function that returns how many bytes of the file on disk were read)."""
    try:
        raw = open(path, "rb")
        if path.lower().endswith(".gz"):
            return io.BufferedReader(gzip.GzipFile(fileobj=raw), CHUNK), raw.tell
        if path.lower().endswith(".zst"):
            import pyarrow
            return io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, "r"), "zstd"), CHUNK), raw.tell
        return raw, raw.tell
    except OSError as e:
        raise DataError(f"cannot open data file {path}: {e.strerror or e}") from None


def ranges(path, kind):
    size = os.path.getsize(path)
    step = min(CHUNK, max(size // 16, 1 << 16))  # several workers share a small file, too
    for start in range(0, size, step):
        yield (kind, path, start, min(start + step, size)), min(start + step, size)


def line_blocks(path):
    f, tell = open_binary(path)
    with f:
        while True:
            block = f.read(CHUNK)
            if not block:
                return
            if not block.endswith(b"\n"):
                block += f.readline(limits.LINE)
                if len(block) >= limits.LINE:
                    raise DataError(f"{path}: a line of more than {limits.LINE >> 20} MiB")
            yield ("lines", block), tell()


def array_elements(path):
    """Chunks of a top-level array's elements, as text; the whole array is never in memory."""
    f, tell = open_binary(path)
    decoder, buffer, at, line, column, ended = json.JSONDecoder(), "", 0, 1, 0, False
    decode = io.TextIOWrapper(f, encoding="utf-8-sig")
    batch, size, state = [], 0, "begin"  # then "first", "next" (after a comma), "after" (an element)

    def fail(message, offset):
        text = buffer[:offset]
        here = text.rfind("\n")
        raise DataError(f"{path}:{line + text.count(chr(10))}:{offset - here + (column if here < 0 else 0)}: {message}")

    def skip(i):
        while i < len(buffer) and buffer[i] in " \t\r\n":
            i += 1
        return i

    with f:
        while True:
            at = skip(at)
            if at < len(buffer) or ended:
                c = buffer[at:at + 1]
                if state == "begin":
                    if c != "[":
                        fail("not a JSON array of samples, nor a JSON object a line", at)
                    state, at = "first", at + 1
                    continue
                if c == "]" and state != "next":
                    if skip(at + 1) < len(buffer):
                        fail("text after the array", at + 1)
                    break
                if c == "," and state == "after":
                    at, state = at + 1, "next"
                    continue
                if c and state != "after":
                    try:
                        _, end = decoder.raw_decode(buffer, at)
                        if end < len(buffer) or ended:
                            batch.append(buffer[at:end])
                            size, at, state = size + end - at, end, "after"
                            if size >= CHUNK:
                                yield ("objects", batch), tell()
                                batch, size = [], 0
                            continue
                    except RecursionError:
                        fail("JSON nested too deep", at)
                    except json.JSONDecodeError as e:
                        # perhaps it is only incomplete: at the end of what was read, or in a string
                        if ended or (e.pos < len(buffer) - 16 and not e.msg.startswith("Unterminated")):
                            fail("not valid JSON", e.pos)
                elif c:
                    fail("not valid JSON", at)
                if ended:
                    fail("the array does not end", at)
                if len(buffer) - at > limits.LINE:
                    fail(f"an element of more than {limits.LINE >> 20} MiB", at)
            try:
                block = decode.read(CHUNK)
            except UnicodeDecodeError as e:
                raise DataError(f"{path}: not UTF-8: {e.reason}") from None
            begin = buffer.rfind("\n", 0, at) + 1
            line, column = line + buffer.count("\n", 0, at), at - begin + (0 if begin else column)
            buffer, at, ended = buffer[at:] + block, 0, not block
        if batch:
            yield ("objects", batch), tell()


def header_of(path, reader):
    """The names in the first row of a table of text."""
    names = [name.strip() for name in next(reader, [])]
    if not any(names):
        raise DataError(f"{path}: the first row must name the columns")
    twice = next((n for n in names if names.count(n) > 1), None)
    if twice is not None:
        raise DataError(f'{path}:1: two columns have the name "{twice}"')
    return names


def table_rows(path, separator):
    """Chunks of the rows of a .csv or .tsv file. Its first row has the names of the columns; fields may have line breaks."""
    csv.field_size_limit(limits.LINE)
    f, tell = open_binary(path)
    with f, io.TextIOWrapper(f, encoding="utf-8-sig", newline="") as text:
        reader = csv.reader(text, delimiter=separator, strict=True)
        rows, size, begun = [], 0, 0
        try:
            header = header_of(path, reader)
            line = reader.line_num  # lines before the row
            for fields in reader:
                if fields and len(fields) != len(header):
                    raise DataError(f"{path}:{line + 1}: {len(fields)} fields, but the first row names {len(header)} columns")
                if fields:
                    rows.append((line + 1 - begun, fields))
                    size += sum(map(len, fields))
                line = reader.line_num
                if size >= CHUNK:
                    yield ("rows", header, rows, line - begun), tell()
                    rows, size, begun = [], 0, line
        except csv.Error as e:
            raise DataError(f"{path}:{reader.line_num}: {e}") from None
        except UnicodeDecodeError as e:
            raise DataError(f"{path}: not UTF-8: {e.reason}") from None
        if rows:
            yield ("rows", header, rows, line - begun), tell()


def batches(path):
    import pyarrow
    import pyarrow.ipc
    import pyarrow.parquet
    try:
        size = os.path.getsize(path)
        if kind_of(path) == "parquet":
            table = pyarrow.parquet.ParquetFile(path)
            rows, parts = table.metadata.num_rows, table.iter_batches(batch_size=ROWS)
        else:
            source = pyarrow.memory_map(path)
            try:
                reader = pyarrow.ipc.open_file(source)
                parts = (reader.get_batch(i) for i in range(reader.num_record_batches))
            except pyarrow.ArrowInvalid:
                parts = pyarrow.ipc.open_stream(source)
            rows = 0
        done = 0
        for part in parts:
            rows_at_once = max(1, min(ROWS, part.num_rows * CHUNK // max(part.nbytes, 1)))  # rows may be whole books
            for at in range(0, part.num_rows, rows_at_once):
                piece = part.slice(at, rows_at_once)
                sink = pyarrow.BufferOutputStream()
                with pyarrow.ipc.new_stream(sink, piece.schema) as w:
                    w.write_batch(piece)
                done += piece.num_rows
                yield ("arrow", sink.getvalue().to_pybytes()), size * done // max(rows, done)
    except (OSError, pyarrow.ArrowException) as e:
        raise DataError(f"cannot read {path}: {e}") from None


def chunks(path):
    """(chunk, bytes of the file read so far) of a file, in order."""
    if not os.path.isfile(path):
        raise DataError(f"cannot open data file {path}: {'it is a folder' if os.path.isdir(path) else 'no such file'}")
    kind = kind_of(path)
    if kind not in ("parquet", "arrow"):
        check_encoding(path)
    if kind in ("parquet", "arrow"):
        if is_compressed(path):
            raise DataError(f"{path}: a compressed {kind} file: uncompress it (its columns are compressed already)")
        return batches(path)
    if kind == "json":
        return guarded(array_elements(path), path)
    if kind in SEPARATORS:
        return guarded(table_rows(path, SEPARATORS[kind]), path)
    if is_compressed(path):
        if kind == "plain":
            raise DataError(f"{path}: compressed plain text: uncompress it, or use .jsonl.gz or .jsonl.zst")
        return guarded(line_blocks(path), path)
    return ranges(path, "text" if kind == "plain" else "range")


def guarded(source, path):
    try:
        yield from source
    except (OSError, EOFError) as e:
        raise DataError(f"cannot read {path}: {e}") from None


def lines_of(path, start, end):
    """The lines of a file that begin in [start, end)."""
    with open(path, "rb") as f:
        if start:
            f.seek(start - 1)
            f.readline()
        at = f.tell()
        if at >= end:
            return
        block = f.read(end - at)
        if not block.endswith(b"\n"):
            block += f.readline()
    yield from io.BytesIO(block)


def parse_lines(lines):
    """[(line, record)], number of lines."""
    out, n = [], 0
    for raw in lines:
        n += 1
        raw = raw.strip()
        if n == 1:
            raw = raw.removeprefix(codecs.BOM_UTF8)  # some editors put it before the first line
        if not raw:
            continue
        try:
            text = raw.decode()
            out.append((n, json.loads(text)))
        except UnicodeDecodeError as e:
            raise SampleError(n - 1, "not UTF-8", e.start + 1) from None
        except json.JSONDecodeError as e:
            raise SampleError(n - 1, "not valid JSON", e.colno) from None
        except RecursionError:
            raise SampleError(n - 1, "JSON nested too deep") from None
    return out, n


def as_json(value, kind):
    """A value of a column of an Arrow type as JSON would have it. Arrow gives every struct all keys of the column; those that the row
    does not have are None, and dropped."""
    import pyarrow
    is_a = pyarrow.types
    if isinstance(kind, pyarrow.BaseExtensionType):
        kind = kind.storage_type
    if is_a.is_map(kind) and value is not None:
        return {k if isinstance(k, str) else str(k): as_json(v, kind.item_type) for k, v in value}
    if isinstance(value, dict):
        return {f.name: as_json(value[f.name], f.type) for f in kind if value.get(f.name) is not None}
    if isinstance(value, list):
        return [as_json(v, kind.value_type) for v in value]
    if isinstance(value, decimal.Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def records(chunk):
    """([(place, record)], number of places in the chunk); a place is a line from 1 or an index from 0."""
    kind = chunk[0]
    if kind == "range":
        return parse_lines(lines_of(*chunk[1:]))
    if kind == "lines":
        return parse_lines(io.BytesIO(chunk[1]))
    if kind == "objects":
        out = [(i, json.loads(t)) for i, t in enumerate(chunk[1])]
        return out, len(out)
    if kind == "rows":
        _, header, rows, n_lines = chunk
        return [(line, dict(zip(header, fields))) for line, fields in rows], n_lines
    import pyarrow.ipc
    with pyarrow.ipc.open_stream(chunk[1]) as r:
        kind, rows = pyarrow.struct(list(r.schema)), r.read_all().to_pylist()
    return [(i, as_json(v, kind)) for i, v in enumerate(rows)], len(rows)


def text_of(chunk):
    """The text of a plain file from the first line that begins in the range to the first one after it.

    Line breaks that follow each other stay together, so that no piece of a tokenizer is cut."""
    _, path, start, end = chunk
    with open(path, "rb") as f:
        def line_after(at):
            if at == 0:
                return 0
            f.seek(at - 1)
            f.readline()
            here = f.tell()
            while f.read(1) in (b"\n", b"\r"):
                here = f.tell()
            return here
        a, b = line_after(start), line_after(end) if end < os.fstat(f.fileno()).st_size else end
        f.seek(a)
        block = f.read(max(b - a, 0))
    try:
        return block.decode().removeprefix("" if start else "\ufeff")
    except UnicodeDecodeError as e:
        raise DataError(f"{path}: byte {a + e.start} is not UTF-8") from None
