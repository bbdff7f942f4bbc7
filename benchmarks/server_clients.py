"""Clients that others wrote against a running server: litellm, langchain-openai and schemathesis.

    python -m slipstream serve --max-model-len 1024 &       # answers without a limit end within the timeout
    python benchmarks/server_clients.py http://127.0.0.1:8000 [--examples 50]

Runs in an environment of its own, which needs nothing of this project:

    pip install litellm langchain-openai schemathesis
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

HI = [{"role": "user", "content": "Say hi."}]


def check_litellm(url: str, model: str) -> None:
    import litellm

    how = {"model": f"openai/{model}", "api_base": f"{url}/v1", "api_key": "none", "messages": HI, "max_tokens": 12}
    whole = litellm.completion(**how, temperature=0)
    text = whole.choices[0].message.content
    assert text and whole.usage.completion_tokens <= 12
    parts = [chunk.choices[0].delta.content or "" for chunk in litellm.completion(**how, temperature=0, stream=True)]
    assert "".join(parts) == text, (parts, text)
    try:
        litellm.completion(**{**how, "temperature": -1})
    except litellm.BadRequestError as error:
        assert "temperature" in str(error)
    else:
        raise AssertionError("a bad temperature was taken")


def check_langchain(url: str, model: str) -> None:
    from langchain_openai import ChatOpenAI, OpenAI

    chat = ChatOpenAI(model=model, base_url=f"{url}/v1", api_key="none", temperature=0, max_tokens=12)
    whole = chat.invoke("Say hi.")
    assert whole.content and whole.usage_metadata["output_tokens"] <= 12
    assert "".join(chunk.content for chunk in chat.stream("Say hi.")) == whole.content
    by_responses = ChatOpenAI(
        model=model, base_url=f"{url}/v1", api_key="none", temperature=0, max_tokens=12, use_responses_api=True
    )
    assert by_responses.invoke("Say hi.").text == whole.content
    completion = OpenAI(model=model, base_url=f"{url}/v1", api_key="none", temperature=0, max_tokens=5)
    assert completion.invoke("Once upon")
    assert len(completion.batch(["Once upon", "In the"])) == 2


def check_schema(url: str, examples: int) -> None:
    """No 5xx, whatever the schema allows; and every status is one that the schema names."""
    command = [str(Path(sys.executable).parent / "schemathesis"), "run", f"{url}/openapi.json"]
    command += ["--checks", "not_a_server_error", "--max-examples", str(examples), "--request-timeout", "120"]
    subprocess.run(command, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("--examples", type=int, default=50)
    given = parser.parse_args()
    import httpx

    model = httpx.get(f"{given.url}/v1/models").json()["data"][0]["id"]
    for name, check in (("litellm", check_litellm), ("langchain-openai", check_langchain)):
        check(given.url, model)
        print(f"{name}: ok")
    check_schema(given.url, given.examples)
    print("schemathesis: ok")


if __name__ == "__main__":
    main()
