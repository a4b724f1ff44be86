"""LoRA adapters: many fine-tunings of one model, side by side in one step (Hu et al. 2021; Punica, Chen et al. 2023;
S-LoRA, Sheng et al. 2023).

    peft.py       a folder as PEFT writes it: checked, described           (no torch)
    layout.py     what lies where in a device's blocks                     (no torch)
    reading.py    its factors in host memory, packed into blocks
    slots.py      the adapters that a device holds, and bringing one in

What may not live here: the arithmetic (kernels/lora), the layer that adds it (layers/delta.py).
"""
