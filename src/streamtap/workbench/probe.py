"""``Probe``: a classifier on rows of the residual stream, or on the prompts that they come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from streamtap.errors import InvalidInput, Unsupported
from streamtap.layers import LayerSpec
from streamtap.pooling import Pooling
from streamtap.probes.estimators import Estimator, convergence, fit_classifier, make_classifier, name_of
from streamtap.probes.labels import read_labels
from streamtap.probes.linear import raw_direction
from streamtap.probes.rows import Rows, layer_of, read_rows
from streamtap.probes.scores import Scores, score_classifier
from streamtap.spec import PromptLike
from streamtap.workbench.prompt_probe import PromptRows, read_examples, read_prompts

if TYPE_CHECKING:
    from streamtap.engines.base import Engine
    from streamtap.workbench.unified_cache import UnifiedCache

__all__ = ["Probe", "Scores"]


class Probe:
    """A classifier on rows [rows, hidden], with its scaling learnt from the training rows.

    ``classifier`` is "logistic_regression", "ridge", "lda", "mass_mean" or a scikit-learn
    classifier, which is cloned. ``preprocessing`` is "standard", "none", "pca:N" or
    "standard+pca:N". Everything is stored as given and checked when fitted.

    Rows are numpy (bfloat16 and float16 too), a torch tensor on any device, a nested list, or
    ``Activations`` with one row a prompt. Labels are ints, bools or strings, and predictions come
    back in that type.

    With ``model`` and ``layer`` it learns from prompts too, and predicts for them: ``fit``, ``predict``,
    ``predict_proba``, ``score`` and ``evaluate``. Their rows come from a ``UnifiedCache`` of that model, made when it
    is first needed, so that no prompt runs twice; or from ``cache``, which then says what runs the model.

    Args:
        classifier: See above.
        random_state: Of the solver.
        classifier_kwargs: More arguments of the classifier.
        preprocessing: See above.
        model: What prompts are run with: a name, a folder, or an engine; as for ``UnifiedCache``.
        layer: The one block whose rows are read: ``16``, ``-1``, ``"middle"``. None takes the layer that was fitted, or
            the only one that ``cache`` names.
        pooling: How a prompt's rows become one.
        backend: What runs the model: ``"local"``, ``"nnsight"``, ``"vllm"``, or ``"api"``, a service.
        remote: With ``backend="nnsight"``, run on NDIF.
        batch_size: At most this many prompts in a batch.
        device: ``"auto"``, ``"cpu"``, ``"cuda:1"``, …
        dtype: None keeps the checkpoint's.
        api_base: Address of the service; by default that of the environment.
        api_key: Its key; by default that of the environment.
        cache_dir: Folder where rows are kept; by default that of ``UnifiedCache``.
        cache: A ``UnifiedCache`` to take rows from, instead of ``model`` and what says how to run it.

    After fitting:

    - ``classes_`` [classes]: the labels, ascending.
    - ``converged_``: False where the solver stopped at its iteration limit; None where the
      solver does not say (closed forms have no iterations). ``n_iter_``: the iterations, or None.
    - ``direction_`` float64 [hidden] and ``intercept_``: for a linear classifier of two labels,
      in the space of the raw rows with the preprocessing folded in: ``rows @ direction_ +
      intercept_ > 0`` says ``classes_[1]``. Not of unit length. None for other classifiers.
    - ``layer_``: the layer of the ``Activations`` or prompts it was fitted on; None for plain arrays.
    - ``pipeline_``: the fitted scikit-learn pipeline.
    """

    classes_: NDArray[Any]
    converged_: bool | None
    n_iter_: int | None
    direction_: NDArray[np.float64] | None
    intercept_: float | None
    layer_: int | None
    pipeline_: Estimator

    def __init__(
        self,
        classifier: str | Estimator = "logistic_regression",
        *,
        random_state: int | None = None,
        classifier_kwargs: Mapping[str, Any] | None = None,
        preprocessing: str = "standard",
        model: str | Path | Engine | None = None,
        layer: LayerSpec | None = None,
        pooling: Pooling = "last_token",
        backend: str = "local",
        remote: bool = False,
        batch_size: int | None = 8,
        device: str = "auto",
        dtype: Any = None,
        api_base: str | None = None,
        api_key: str | None = None,
        cache_dir: Path | str | None = None,
        cache: UnifiedCache | None = None,
    ) -> None:
        """Store the choices; nothing is checked, and no model loaded, before the first fit."""
        self.classifier = classifier
        self.random_state = random_state
        self.classifier_kwargs = classifier_kwargs
        self.preprocessing = preprocessing
        self.source = PromptRows(
            *(model, layer, pooling, backend, remote, batch_size, device, dtype),
            *(api_base, api_key, cache_dir, cache),
        )

    def __repr__(self) -> str:
        """The choices, and whether it is fitted."""
        state = f"fitted on {self.pipeline_.n_features_in_} columns" if hasattr(self, "pipeline_") else "not fitted"
        return f"Probe(classifier={name_of(self.classifier)!r}, preprocessing={self.preprocessing!r}; {state})"

    def close(self) -> None:
        """Close the cache that was made for prompts; one that was given stays open. It opens again when needed."""
        self.source.close()

    def fit(self, prompts: Sequence[PromptLike], labels: Any) -> Probe:
        """Fit on prompts and ``labels`` [prompts], or on positive and negative prompts: ``fit(positive, negative)``.

        The second argument is negative prompts where it is a list or tuple of nothing but texts, chats, lists of token
        ids or ``Prompt``; positive prompts then have the label 1 and negative ones 0, and the two need not be equally
        many. Everything else is labels, and so is every array: labels of text go in as ``numpy.array(labels)``. A list
        that may be either, as long as the first and with a text in it twice, is refused.

        Raises:
            InvalidInput: no model or layer was named, an unknown classifier or parameter, or a second list in doubt.
            InvalidPrompt: a prompt that cannot be run, named by its index before any work.
            InvalidRows: labels that cannot be learnt from; the message says why, and no prompt was run.
        """
        make_classifier(self.classifier, self.random_state, self.classifier_kwargs, self.preprocessing)
        examples, answers = read_examples(prompts, labels)
        rows, layer = self.source.take(examples)
        self.fit_from_activations(rows, answers)
        self.layer_ = layer
        return self

    def predict(self, prompts: Sequence[PromptLike]) -> NDArray[Any]:
        """Labels [prompts], in the type of the training labels.

        Raises:
            InvalidInput: not fitted yet, no model was named, or another layer than the fitted one.
            InvalidPrompt: a prompt that cannot be run, named by its index before any work.
        """
        return self.predict_from_activations(self._rows_of(prompts))

    def predict_proba(self, prompts: Sequence[PromptLike]) -> NDArray[np.float64]:
        """Probabilities float64 [prompts, classes], columns in the order of ``classes_``.

        Raises:
            Unsupported: the classifier gives none, as "ridge" does; no prompt was run.
            InvalidInput, InvalidPrompt: as for ``predict``.
        """
        self._with_probabilities()
        return self.predict_proba_from_activations(self._rows_of(prompts))

    def score(self, prompts: Sequence[PromptLike], labels: Any) -> float:
        """Accuracy on prompts with ``labels`` [prompts], from 0 to 1.

        Raises:
            InvalidRows: labels that do not fit the prompts; no prompt was run.
            InvalidInput, InvalidPrompt: as for ``predict``.
        """
        return self.evaluate(prompts, labels).accuracy

    def evaluate(self, prompts: Sequence[PromptLike], labels: Any) -> Scores:
        """Accuracy with its interval, balanced accuracy, AUROC and the majority rate, with counts.

        Raises:
            InvalidRows: labels that do not fit the prompts; no prompt was run.
            InvalidInput, InvalidPrompt: as for ``predict``.
        """
        self._fitted()
        read = read_prompts(prompts)
        answers = read_labels(labels, len(read), min_classes=1)
        return self.evaluate_from_activations(self._rows_of(read), answers)

    def fit_from_activations(self, X: Any, y: Any, *, layer: int | None = None) -> Probe:
        """Fit on rows ``X`` [rows, hidden] and labels ``y`` [rows]; ``layer`` chooses one of an ``Activations``.

        A solver that does not converge says so in ``converged_``, beside scikit-learn's own warning.

        Raises:
            InvalidRows: rows or labels that cannot be learnt from; the message says which and why.
            InvalidInput: an unknown classifier, preprocessing or parameter.
        """
        pipeline = make_classifier(self.classifier, self.random_state, self.classifier_kwargs, self.preprocessing)
        rows = read_rows(X, layer=layer)
        labels = read_labels(y, len(rows))
        self.pipeline_ = fit_classifier(pipeline, rows, labels)
        self.layer_ = layer_of(X, layer)
        self.classes_ = np.asarray(self.pipeline_.classes_)
        self.converged_, self.n_iter_ = convergence(self.pipeline_)
        self.direction_, self.intercept_ = raw_direction(self.pipeline_) or (None, None)
        return self

    def predict_from_activations(self, X: Any) -> NDArray[Any]:
        """Labels [rows] for rows ``X`` [rows, hidden], in the type of the training labels.

        Raises:
            InvalidInput: not fitted yet.
            InvalidRows: rows that do not fit those it was fitted on.
        """
        return np.asarray(self._fitted().predict(self._read(X)))

    def predict_proba_from_activations(self, X: Any) -> NDArray[np.float64]:
        """Probabilities float64 [rows, classes], columns in the order of ``classes_``.

        Raises:
            Unsupported: the classifier gives none, as "ridge" does.
            InvalidInput: not fitted yet.
            InvalidRows: rows that do not fit those it was fitted on.
        """
        pipeline = self._with_probabilities()
        return np.asarray(pipeline.predict_proba(self._read(X)), dtype=np.float64)

    def score_from_activations(self, X: Any, y: Any) -> float:
        """Accuracy on rows ``X`` [rows, hidden] with labels ``y`` [rows], from 0 to 1.

        Raises:
            InvalidInput: not fitted yet.
            InvalidRows: rows or labels that do not fit those it was fitted on.
        """
        return self.evaluate_from_activations(X, y).accuracy

    def evaluate_from_activations(self, X: Any, y: Any) -> Scores:
        """Accuracy with its interval, balanced accuracy, AUROC and the majority rate, with counts.

        Raises:
            InvalidInput: not fitted yet.
            InvalidRows: rows or labels that do not fit those it was fitted on.
        """
        pipeline, rows = self._fitted(), self._read(X)
        return score_classifier(pipeline, rows, read_labels(y, len(rows), min_classes=1))

    def _read(self, X: Any) -> Rows:
        return read_rows(X, layer=self.layer_, hidden=self.pipeline_.n_features_in_)

    def _rows_of(self, prompts: Sequence[PromptLike]) -> NDArray[Any]:
        self._fitted()
        return self.source.take(read_prompts(prompts), self.layer_)[0]

    def _with_probabilities(self) -> Estimator:
        pipeline = self._fitted()
        if not hasattr(pipeline, "predict_proba"):
            raise Unsupported(
                f"classifier {name_of(self.classifier)!r} gives no probabilities; use 'logistic_regression', 'lda' or "
                "'mass_mean', or predict_from_activations for labels alone."
            )
        return pipeline

    def _fitted(self) -> Estimator:
        if not hasattr(self, "pipeline_"):
            raise InvalidInput(
                "this Probe is not fitted yet; call fit_from_activations(X, y), or fit(prompts, labels), first."
            )
        return self.pipeline_
