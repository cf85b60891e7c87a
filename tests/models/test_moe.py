"""The experts that a resident model hands to its store are its parameters as they are now."""

from mlx_moeflux.models.moe import SwitchGLU


def test_a_bank_is_kept_until_a_parameter_changes():
    experts = SwitchGLU(3, 64, 32).eval()
    bank = experts.bank()
    assert experts.bank() is bank
    experts.up_proj.weight = experts.up_proj.weight + 1
    assert experts.bank().up.weight is experts.up_proj.weight


def test_training_keeps_no_old_parameters():
    experts = SwitchGLU(3, 64, 32).eval()
    bank = experts.bank()
    experts.train()
    assert experts.bank() is not bank
    assert all(value is not bank for value in vars(experts).values())
