//! How fast blocks of 16 cells leave and enter the CPU's pools, by storage (the median of a block): `cargo run --release -p
//! kvist-cpu --example transfers`. The layers are those of a Llama 3 8B, 32 of them with 8 KV heads of 128, or given: `-- 22 4 64`.
//!
//! Every block has memory of its own, on the host and in the pools, more of it than caches hold, as blocks of a tier have.
use kvist_cache::{CellRun, GroupId, LayerId};
use kvist_cpu::Cpu;
use kvist_device::*;
use std::time::{Duration, Instant};

const CELLS: u32 = 16;
/// Bytes of all blocks together.
const BYTES: usize = 256 << 20;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let shape: Vec<u32> = std::env::args().skip(1).map(|arg| arg.parse()).collect::<Result<_, _>>()?;
    let [layers, kv_heads, head_dim] = shape.try_into().unwrap_or([32, 8, 128]);
    println!("{:6} {:>12} {:>14} {:>14}", "dtype", "block, KiB", "export, GB/s", "import, GB/s");
    for name in ["f32", "f16", "q8", "q4", "t4"] {
        let storage: Storage = name.parse()?;
        let layer = |l| LayerSpec::new(GroupId(0), LayerId(l), kv_heads, head_dim);
        let layout = Layout { n_heads: 4 * kv_heads, layers: (0..layers as u16).map(layer).collect() };
        let cell_bytes = layout.layers.iter().map(|l| l.cell_bytes(storage, storage)).sum::<u64>();
        let cell_bytes = cell_bytes as usize * kv_heads as usize;
        let n_blocks = (BYTES / cell_bytes) as u32 / CELLS;
        let spec = PoolSpec {
            layout,
            k: storage,
            v: storage,
            capacity_cells: vec![n_blocks * CELLS],
            max_step_tokens: 1,
            budget: MemoryBudget::unlimited(),
            channels: None,
            recent: Recent::default(),
        };
        let mut pools = Cpu::default().pools(&spec)?;
        let bytes = pools.block_bytes(GroupId(0), CELLS).ok_or("blocks are too large")?;
        let mut blocks = (0..n_blocks).map(|_| HostBlock::new(bytes)).collect::<Result<Vec<_>, _>>()?;
        let mut times = [Vec::new(), Vec::new()];
        // The first passes touch the pages and are not measured.
        for pass in 0..6 {
            for import in [true, false] {
                for b in 0..n_blocks {
                    // No neighbours, as in a cache that has been used.
                    let cells = CellRun { start: b * 7 % n_blocks * CELLS, len: CELLS };
                    let block = std::mem::replace(&mut blocks[b as usize], HostBlock::new(0)?);
                    let begun = Instant::now();
                    let transfer = match import {
                        true => pools.import(Ticket::START, GroupId(0), cells, block)?,
                        false => pools.export(Ticket::START, GroupId(0), cells, block)?,
                    };
                    blocks[b as usize] = pools.finished(&transfer).ok_or("the CPU copies at once")??;
                    if pass > 0 {
                        times[usize::from(import)].push(begun.elapsed());
                    }
                }
            }
        }
        let [exports, imports] = times.map(|mut times| {
            times.sort();
            times[times.len() / 2]
        });
        let speed = |time: Duration| bytes as f64 / time.as_secs_f64() / 1e9;
        println!("{name:6} {:12} {:14.1} {:14.1}", bytes / 1024, speed(exports), speed(imports));
    }
    Ok(())
}
