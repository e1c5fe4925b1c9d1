"""Classifiers by name, each a pipeline with its preprocessing inside."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from sklearn.base import clone
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression, RidgeClassifier
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import StandardScaler

from streamtap.errors import InvalidInput, InvalidRows
from streamtap.probes.lda import ShrinkageLda
from streamtap.probes.mass_mean import MassMeanClassifier

#: A scikit-learn estimator; it ships no types.
Estimator = Any

_BUILDERS: dict[str, Callable[[], Estimator]] = {
    # On scaled rows lbfgs needs about 100 steps; the room is for unscaled ones.
    "logistic_regression": lambda: LogisticRegression(solver="lbfgs", max_iter=2000),
    "ridge": RidgeClassifier,
    "lda": ShrinkageLda,
    "mass_mean": MassMeanClassifier,
}
CLASSIFIERS: tuple[str, ...] = tuple(_BUILDERS)

_PREPROCESSING = re.compile(r"(?P<plain>none|standard)|(?P<scale>standard\+)?pca:(?P<components>[1-9]\d*)")


def make_classifier(
    classifier: str | Estimator = "logistic_regression",
    random_state: int | None = None,
    classifier_kwargs: Mapping[str, Any] | None = None,
    preprocessing: str = "standard",
) -> Estimator:
    """An unfitted pipeline of preprocessing and classifier, so that scaling is learnt from training rows only.

    ``classifier`` is a name of ``CLASSIFIERS`` or a scikit-learn classifier, which is cloned and
    never changed. ``preprocessing`` is "standard" (each column to mean 0 and deviation 1), "none",
    "pca:N" or "standard+pca:N". ``random_state`` fills in where the estimator has one and it is unset.

    Raises:
        InvalidInput: an unknown name, preprocessing or parameter, or an object that is no classifier.
    """
    steps = _preprocessing_steps(preprocessing, random_state)
    estimator = _BUILDERS[classifier]() if _is_named(classifier) else _cloned(classifier)
    known = estimator.get_params()
    if "random_state" in known and known["random_state"] is None:
        estimator.set_params(random_state=random_state)
    wanted = dict(classifier_kwargs or {})
    if unknown := sorted(set(wanted) - set(known)):
        name = name_of(classifier)
        raise InvalidInput(f"{name} has no parameter {', '.join(unknown)}; it takes {', '.join(sorted(known))}.")
    return Pipeline([*steps, ("classifier", estimator.set_params(**wanted))])


def fit_classifier(pipeline: Estimator, rows: Any, labels: Any) -> Estimator:
    """Fit ``pipeline`` on rows [rows, hidden] and labels [rows], and return it.

    Raises:
        InvalidRows: fewer rows or columns than the PCA of the pipeline has components.
        InvalidInput: a parameter that the estimator refuses; its own words are in the message.
    """
    components = pipeline.named_steps["pca"].n_components if "pca" in pipeline.named_steps else 0
    if components > min(rows.shape):
        raise InvalidRows(f"pca:{components} needs at least {components} rows and columns; got {rows.shape}.")
    try:
        pipeline.fit(rows, labels)
    except InvalidInput:
        raise
    except (ValueError, TypeError) as error:
        raise InvalidInput(f"the classifier {name_of(pipeline[-1])} could not be fitted: {error}") from error
    if not hasattr(pipeline[-1], "classes_"):
        raise InvalidInput(f"{name_of(pipeline[-1])} keeps no classes_ after fit, as scikit-learn's classifiers do.")
    return pipeline


def convergence(pipeline: Estimator) -> tuple[bool | None, int | None]:
    """Whether the solver of a fitted pipeline converged, and its iterations; None where it does not say."""
    estimator = pipeline[-1]
    counts = getattr(estimator, "n_iter_", None)
    if counts is None:
        return None, None
    most = int(np.max(counts))
    limit = getattr(estimator, "max_iter", None)
    # Boosters have both numbers too, and always use their limit up; only linear solvers have coef_.
    if limit is None or limit < 1 or not hasattr(estimator, "coef_"):
        return None, most
    return most < limit, most


def name_of(classifier: str | Estimator) -> str:
    """The classifier's name as shown to people."""
    return classifier if isinstance(classifier, str) else type(classifier).__name__


def _is_named(classifier: Any) -> bool:
    if isinstance(classifier, str) and classifier not in _BUILDERS:
        raise InvalidInput(
            f"classifier must be one of {', '.join(CLASSIFIERS)} or a scikit-learn classifier; got {classifier!r}."
        )
    return isinstance(classifier, str)


def _cloned(estimator: Any) -> Estimator:
    if isinstance(estimator, type):
        raise InvalidInput(f"classifier must be an instance; write {estimator.__name__}() with the parentheses.")
    lacking = [name for name in ("fit", "predict", "get_params", "set_params") if not hasattr(estimator, name)]
    if lacking:
        raise InvalidInput(
            f"classifier must be one of {', '.join(CLASSIFIERS)} or an object with scikit-learn's methods; "
            f"{type(estimator).__name__} lacks {', '.join(lacking)}."
        )
    if hasattr(estimator, "__sklearn_tags__") and estimator.__sklearn_tags__().estimator_type not in (
        "classifier",
        None,
    ):
        kind = estimator.__sklearn_tags__().estimator_type
        raise InvalidInput(f"classifier must be a classifier; {type(estimator).__name__} is a {kind}.")
    return clone(estimator)


def _preprocessing_steps(preprocessing: Any, random_state: int | None) -> list[tuple[str, Estimator]]:
    match = _PREPROCESSING.fullmatch(preprocessing) if isinstance(preprocessing, str) else None
    if match is None:
        raise InvalidInput(
            f"preprocessing must be 'standard', 'none', 'pca:N' or 'standard+pca:N'; got {preprocessing!r}."
        )
    steps: list[tuple[str, Estimator]] = []
    if match["plain"] == "standard" or match["scale"]:
        steps.append(("standard", StandardScaler()))
    if match["components"]:
        steps.append(("pca", PCA(n_components=int(match["components"]), random_state=random_state)))
    return steps
