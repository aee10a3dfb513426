//! How fast blocks of 16 cells leave and enter the CPU's pools, by storage (the median of a block): `cargo run -p
//! kvist-cpu --example transfers`.
//!
//! The layers are those of a Llama 3 8B: 32 of them, 8 KV heads of 128.
use kvist_cache::{CellRun, GroupId, LayerId};
use kvist_cpu::Cpu;
use kvist_device::*;
use std::time::{Duration, Instant};

const BLOCKS: u32 = 128;
const CELLS: u32 = 16;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("{:6} {:>12} {:>14} {:>14}", "dtype", "block, KiB", "export, GB/s", "import, GB/s");
    for name in ["f32", "f16", "q8", "q4", "t4"] {
        let storage: Storage = name.parse()?;
        let layer = |l| LayerSpec::new(GroupId(0), LayerId(l), 8, 128);
        let spec = PoolSpec {
            layout: Layout { n_heads: 32, layers: (0..32).map(layer).collect() },
            k: storage,
            v: storage,
            capacity_cells: vec![BLOCKS * CELLS],
            max_step_tokens: 1,
            budget: MemoryBudget::unlimited(),
            channels: None,
            recent: Recent::default(),
        };
        let mut pools = Cpu::default().pools(&spec)?;
        let bytes = pools.block_bytes(GroupId(0), CELLS).ok_or("blocks are too large")?;
        let mut block = HostBlock::new(bytes)?;
        let mut times = [Vec::new(), Vec::new()];
        // The first import touches the pages and is not measured.
        for pass in 0..5 {
            for import in [true, false] {
                for cells in (0..BLOCKS).map(|b| CellRun { start: b * CELLS, len: CELLS }) {
                    let begun = Instant::now();
                    let transfer = match import {
                        true => pools.import(Ticket::START, GroupId(0), cells, block)?,
                        false => pools.export(Ticket::START, GroupId(0), cells, block)?,
                    };
                    block = pools.finished(&transfer).ok_or("the CPU copies at once")??;
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
