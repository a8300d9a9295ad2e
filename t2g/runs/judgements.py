"""The paid judgements of a training run, in files from which a resumed run takes them.

judgements/step-00000010.jsonl   judgements since the checkpoint of step 10; step 0: since the start

A line has the key of a judgement, a hash of criterion, source version, prompt and response, and its feedback. Of
several criteria each has its own lines. Files before the oldest kept checkpoint are removed: no resume needs them.

A process takes what earlier processes recorded, each line once. Its own judgements are not shared: a source may judge
equal responses differently. After a resume, a judgement from before the checkpoint may answer an equal response of a
later step. What failed, or was in progress when the process ended, is requested again.
"""

import hashlib
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from pydantic import BaseModel

from t2g.feedback.sources.combined import CombinedFeedback
from t2g.interfaces import FeedbackSource
from t2g.runs.identity import Identity
from t2g.runs.journal import Journal, read_journal
from t2g.types import Prompt, SpanFeedback

FOLDER = "judgements"
SYNC_S = 0.2  # a power cut loses the judgements of this time


class JournaledJudgement(BaseModel):
    """A line of the journal."""

    key: str
    feedback: SpanFeedback


class JournaledFeedback(FeedbackSource):
    """A feedback source whose usable and unparsable judgements are journaled where it has a `judgement_cache_key`.

    With several criteria, each paid one is journaled.
    """

    def __init__(self, source: FeedbackSource, folder: Path, identity: Identity, *, keep: int) -> None:
        """Read what earlier processes recorded in the run folder.

        Args:
            identity: Identity of the run; its hashes of task and feedback belong to the key of a judgement.
            keep: Number of kept checkpoints. `start_file` begins the file of one; before it the file is that of step 0.

        Raises:
            UserError: A line of the journal is not readable.
        """
        self.name = source.name
        self.fleet = source.fleet
        self.judges_turns = source.judges_turns
        self._source = source
        self._folder = folder / FOLDER
        self._contents = identity.contents
        self._recorded: dict[str, deque[SpanFeedback]] = {}
        for path in self._list_files():
            for judgement in read_journal(path, JournaledJudgement):
                self._recorded.setdefault(judgement.key, deque()).append(judgement.feedback)
        self._journal = Journal(self._make_path(0))
        self._steps: deque[int] = deque(maxlen=keep + 1)  # steps of this process's files, the last ones
        self._thread = ThreadPoolExecutor(1)  # syncs and closes files: a slow disk must not block the event loop
        self._syncs: deque[Future[None]] = deque()
        self._is_sync_due = False
        self._closing = threading.Event()

    async def judge(self, prompt: Prompt, response_text: str) -> SpanFeedback:
        """Return a recorded judgement, else the source's, which is recorded unless it failed.

        Raises:
            UserError: The journal cannot be written, or as the source's.
        """
        if isinstance(self._source, CombinedFeedback):
            return await self._source.combine(lambda name, source: self._judge(name, source, prompt, response_text))
        return await self._judge("", self._source, prompt, response_text)

    async def _judge(self, criterion: str, source: FeedbackSource, prompt: Prompt, response_text: str) -> SpanFeedback:
        if not source.judgement_cache_key:
            return await source.judge(prompt, response_text)
        key = self._make_key(criterion, source, prompt, response_text)
        recorded = self._recorded.get(key)
        if recorded:
            return recorded.popleft()
        feedback = await source.judge(prompt, response_text)
        if feedback.status != "failed":
            self._record(JournaledJudgement(key=key, feedback=feedback))
        return feedback

    def _make_key(self, criterion: str, source: FeedbackSource, prompt: Prompt, response_text: str) -> str:
        section = f"feedback.sources.{criterion}." if criterion else "feedback."
        contents = {key: digest for key, digest in self._contents.items() if key.startswith(section) or key == "task"}
        version = f"{criterion}: {source.judgement_cache_key}" if criterion else source.judgement_cache_key
        content = [version, contents, prompt.prompt_id, prompt.prompt_text, prompt.payload, response_text]
        if source.judges_turns:
            content.append(prompt.messages)  # with the turns before this one
        text = repr(content)  # a task's payload may be no JSON
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def _record(self, judgement: JournaledJudgement) -> None:
        """Append a judgement; it is synced within SYNC_S."""
        self._folder.mkdir(exist_ok=True)
        self._journal.append(judgement)
        self._check_syncs()
        if not self._is_sync_due:
            self._is_sync_due = True
            self._syncs.append(self._thread.submit(self._sync_later))

    def _sync_later(self) -> None:
        self._closing.wait(SYNC_S)
        self._is_sync_due = False  # a line that is written from now on needs another sync
        self._journal.sync()

    def _check_syncs(self) -> None:
        """Raise the error of a sync that has ended."""
        while self._syncs and self._syncs[0].done():
            self._syncs.popleft().result()

    def start_file(self, step: int) -> None:
        """Write later judgements into the file of a checkpoint that is written or resumed, and remove unneeded files.

        A file of a later step is kept: the steps after a resume take its judgements.
        """
        self._syncs.append(self._thread.submit(self._journal.close))
        self._journal = Journal(self._make_path(step))
        if step not in self._steps:
            self._steps.append(step)
        is_full = len(self._steps) == self._steps.maxlen
        oldest = self._make_path(self._steps[0] if is_full else 0)
        for path in self._list_files():
            if path < oldest:
                path.unlink()

    def close(self) -> None:
        """Close the journal.

        Raises:
            UserError: Its lines could not be synced to the disk.
        """
        self._closing.set()
        self._syncs.append(self._thread.submit(self._journal.close))
        self._thread.shutdown()
        self._check_syncs()

    def _make_path(self, step: int) -> Path:
        return self._folder / f"step-{step:08d}.jsonl"

    def _list_files(self) -> list[Path]:
        """Return the files of the journal, oldest first."""
        return sorted(self._folder.glob("step-*.jsonl"))
