"""Train on real scans with Accelerate, in two processes, with compressed gradients.

torchrun --nproc-per-node 2 mpi_examples/train_accelerate.py "topk:density=0.01"
"""

import sys

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits

from hvd_compress.torch import DDPState, ddp_hook

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
torch.manual_seed(0)
images, labels = map(torch.as_tensor, load_digits(return_X_y=True))
images = images.float() / 16
data = torch.utils.data.TensorDataset(images[:1500], labels[:1500])
batches = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True)
layers = torch.nn.Linear(64, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 10)
model = torch.nn.Sequential(*layers)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.005)
model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
state = DDPState(*(sys.argv[1:] or ["topk:density=0.01"]), model)  # these three lines are new
model.register_comm_hook(state, ddp_hook)
accelerator.register_for_checkpointing(state)
for epoch in range(5):
    state.set_epoch(epoch)  # for methods with a warm-up
    for x, y in batches:
        with accelerator.accumulate(model):
            accelerator.backward(torch.nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
accelerator.save_state("results/accelerate")  # on all ranks; load_state() brings all back
if accelerator.is_main_process:
    accuracy = (model(images[1500:]).argmax(1) == labels[1500:]).float().mean().item()
    print(f"test accuracy {accuracy:.1%}\n{state.stats().line()}")
accelerator.end_training()
