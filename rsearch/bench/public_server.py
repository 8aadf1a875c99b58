"""python -m rsearch.bench.public_server SETTINGS

A retrieval server as the public systems run it: POST /retrieve {"queries", "topk",
"return_scores"} -> {"result": [[{"document": {"id", "contents"}, "score"}]]}. For each
request it encodes with transformers, on the GPU where there is one, and multiplies with
all vectors, as a flat index does. The HTTP around it is this package's, and cheaper
than theirs. It ends with its stdin.
"""

import json
import os
import pathlib
import sys
import threading

import numpy as np

from rsearch.runtime.server import JsonServer

PATH = "/retrieve"
MAX_TOKENS = 256  # of a query, as published
PREFIXES = {
    "minilm": "",
    "e5": "query: ",
    "bge": "Represent this sentence for searching relevant passages: ",
}


def main(settings: str) -> None:
    """Serves until stdin ends."""
    told = json.loads(settings)
    try:
        search = _search(**told)
    except ModuleNotFoundError as error:
        print(json.dumps({"missing": error.name}), flush=True)
        return

    def answer(body):
        return {"result": [search(q, body["topk"]) for q in body["queries"]]}

    server = JsonServer("127.0.0.1", 0, {("POST", PATH): answer}, max_waiting=1024)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    port = server.server_address[1]
    print(json.dumps({"url": f"http://127.0.0.1:{port}{PATH}"}), flush=True)
    sys.stdin.read()
    os._exit(0)


def _search(folder, encoder, family):
    """A function (query, k) -> hits."""
    import torch
    import transformers

    folder = pathlib.Path(folder)
    passages = json.loads((folder / "texts.json").read_text())["passages"]
    vectors = np.load(folder / "vectors.npy")
    tokenizer = transformers.AutoTokenizer.from_pretrained(encoder)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = transformers.AutoModel.from_pretrained(encoder).eval().to(device)

    def search(query, top_k):
        rows = tokenizer(
            [PREFIXES[family] + query],
            max_length=MAX_TOKENS,
            padding=True,
            truncation=True,
            return_tensors="pt",
        ).to(device)
        with torch.no_grad():
            states = model(**rows).last_hidden_state
        if family == "bge":
            pooled = states[:, 0]
        else:
            mask = rows["attention_mask"][..., None]
            pooled = (states * mask).sum(1) / mask.sum(1)
        pooled = torch.nn.functional.normalize(pooled, dim=-1).cpu().numpy()
        scores = vectors @ pooled[0]
        found = np.argpartition(-scores, top_k - 1)[:top_k]
        return [
            {
                "document": {"id": passages[i][0], "contents": passages[i][1]},
                "score": float(scores[i]),
            }
            for i in found[np.argsort(-scores[found])]
        ]

    return search


if __name__ == "__main__":
    main(*sys.argv[1:])
