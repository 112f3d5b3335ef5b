"""Linear layers whose weights are rounded to eight bits, by torchao."""

import logging
import warnings
from typing import Any

import torch

from decode.common.errors import UserError


def quantize_linear_layers(model: Any) -> None:
    """Turns the weights of the linear layers into int8 with one scale for each row; the LM head keeps its dtype.

    The LM head is left because drafts copy rows of it, and it often is the embedding too. Experts that a model holds
    as stacked tensors are no linear layers and stay as they are. UserError without torchao.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(
            logging.WARNING
        )  # torchao reports each kernel of other devices that it cannot load
        try:
            from torchao.quantization import Int8WeightOnlyConfig, quantize_
        except ImportError as error:
            raise UserError(
                "dtype int8 needs torchao: pip install torchao, or choose another dtype"
            ) from error
        finally:
            logging.disable(logging.NOTSET)
        head = model.get_output_embeddings()
        quantize_(
            model,
            Int8WeightOnlyConfig(),
            filter_fn=lambda module, _: isinstance(module, torch.nn.Linear) and module is not head,
        )
