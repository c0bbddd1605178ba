"""A batch in one piece and the same batch in pieces.

TRL shuffles a batch before it cuts it, so a piece holds any samples, of one branch or both. `dapo` divides by the
tokens of the whole batch, so that the pieces' losses add up to the batch's.
"""

from support.keyed import check_same_course, check_there_was_control


def test_a_batch_in_pieces_has_the_same_loss_kl_and_coefficients_as_in_one(train):
    at_once = train(per_device_train_batch_size=8, gradient_accumulation_steps=1)
    in_pieces = train(per_device_train_batch_size=2, gradient_accumulation_steps=4)
    check_there_was_control(at_once)
    check_same_course(at_once, in_pieces)
