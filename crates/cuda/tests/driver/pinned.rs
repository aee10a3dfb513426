//! Blocks in pinned memory: the device copies to and from them by itself, and they give their memory back.
use crate::common::{DETERMINISTIC, device, emulation};
use crate::decoding::Model;
use kvist_cache::{CellRun, GroupId};
use kvist_cuda::CudaDevice;
use kvist_device::*;
use kvist_testing::SplitMix64;
use std::sync::Arc;

const CELLS: u32 = 200;
const G: GroupId = GroupId(0);

fn model(storage: &str, head_dim: u32, n_layers: u16) -> Model {
    let storage: Storage = storage.parse().unwrap();
    Model {
        k: storage,
        v: storage,
        heads: (3, 3),
        head_dim,
        n_layers,
        max_step_tokens: 8,
        budget: MemoryBudget::new(1 << 30),
        ..Model::default()
    }
}

fn finish(pools: &mut dyn Pools, begun: Result<Transfer, TransferRefused>) -> HostBlock {
    let transfer = begun.unwrap();
    loop {
        if let Some(block) = pools.finished(&transfer) {
            return block.unwrap();
        }
        std::thread::yield_now();
    }
}

/// Part of a block that others have too, as a store returns it.
struct Kept(Arc<HostBlock>, std::ops::Range<usize>);

impl AsRef<[u8]> for Kept {
    fn as_ref(&self) -> &[u8] {
        &self.0.bytes()[self.1.clone()]
    }
}

/// An emulated device whose copies to the host arrive as late as they may.
fn late(settings: &[(&str, &str)]) -> Option<CudaDevice> {
    let settings = [&[("KVIST_EMULATION_LATE", "1")], settings].concat();
    Some(kvist_cuda::open(&emulation(&settings)?, None, DETERMINISTIC).unwrap())
}

/// Through pinned memory come the same bytes as through ordinary memory, and the host copies none of them, however large a block is. Where
/// sides are no whole words, and from an odd byte on, it does.
#[test]
fn blocks_in_pinned_memory_are_copied_by_the_device_alone() {
    [device(), late(&[])].into_iter().flatten().for_each(|device| copied_by_the_device_alone(&device));
}

fn copied_by_the_device_alone(device: &CudaDevice) {
    // From the fourth on they are larger than a part. Of the last two, no part holds all cells of a side: too many bytes, too many cells.
    for (storage, head_dim, n_layers, len) in [
        ("f16", 64, 2, 16),
        ("q8", 64, 2, 16),
        ("f16", 33, 2, 1),
        ("f32", 512, 12, 16),
        ("f32", 2048, 2, 120),
        ("q8", 66, 2, 131),
    ] {
        let name = format!("{storage} {head_dim} {n_layers} {len}");
        let spec = model(storage, head_dim, n_layers).spec(vec![CELLS]);
        let mut pools = device.pools(&spec).unwrap();
        let bytes = spec.block_bytes(G, len).unwrap();
        let arena = pools.pin_host(3 * bytes as u64 + 1000).unwrap().unwrap();
        let pinned = |first: usize| arena.block(bytes + first).unwrap();
        let mut random = SplitMix64(5);
        let content: Vec<u8> = (0..bytes).map(|_| random.next() as u8).collect();
        let of = |start| CellRun { start, len };
        // Of a row of 66 bytes, a multiple of three, one cell is no whole number of words.
        let is_direct = head_dim != 33;
        let mut staged = 0;
        let mut check = |pools: &dyn Pools, is_direct: bool, what: &str| {
            let now = pools.counters().bytes_staged;
            assert_eq!(now == staged, is_direct, "{name}: {what} {now} {staged}");
            staged = now;
        };

        // From pinned memory to cells, and to ordinary memory.
        let mut block = pinned(0);
        block.bytes_mut().copy_from_slice(&content);
        let began = pools.import(Ticket::START, G, of(3), block);
        let block = finish(&mut *pools, began);
        check(&*pools, is_direct, "import");
        let began = pools.export(Ticket::START, G, of(3), HostBlock::new(bytes).unwrap());
        assert!(finish(&mut *pools, began).bytes() == content, "{name}");
        check(&*pools, false, "export to ordinary memory");
        // To pinned memory.
        let began = pools.export(Ticket::START, G, of(3), block);
        let block = finish(&mut *pools, began);
        assert!(block.is_lent() && block.bytes() == content, "{name}");
        check(&*pools, is_direct, "export");
        // From what others have, at any byte, and back: that is not written to, but copied.
        for first in [0, 4, 5] {
            let mut larger = pinned(first);
            larger.bytes_mut()[first..].copy_from_slice(&content);
            let larger = Arc::new(larger);
            let kept = |first: usize| HostBlock::shared(Arc::new(Kept(larger.clone(), first..first + bytes)));
            let began = pools.import(Ticket::START, G, of(40), kept(first));
            finish(&mut *pools, began);
            check(&*pools, is_direct && first % 4 == 0, "import of a part");
            let began = pools.export(Ticket::START, G, of(0), kept(first));
            let exported = finish(&mut *pools, began);
            check(&*pools, false, "export to what others have");
            assert!(exported.bytes() != content && larger.bytes()[first..] == content, "{name}");
            let began = pools.export(Ticket::START, G, of(40), HostBlock::new(bytes).unwrap());
            assert!(finish(&mut *pools, began).bytes() == content, "{name}");
            check(&*pools, false, "export");
        }
        drop(block);
        assert_eq!(arena.usage().lent_bytes, 0, "{name}");
        // The memory of transfers is that of the plan.
        assert_eq!(Some(spec.budget.usage()), device.usage(&spec, &[CELLS]), "{name}");
    }
}

/// Blocks give their memory back on any thread, also after the pools and the device have ended.
#[test]
fn lent_memory_comes_back() {
    let Some(installation) = emulation(&[]) else { return };
    let device = kvist_cuda::open(&installation, None, DETERMINISTIC).unwrap();
    let spec = model("f16", 64, 2).spec(vec![CELLS]);
    let mut pools = device.pools(&spec).unwrap();
    let bytes = spec.block_bytes(G, 16).unwrap();
    assert_eq!(bytes % 64, 0);
    let arena = pools.pin_host(10 * bytes as u64 + 63).unwrap().unwrap();
    let mut blocks: Vec<HostBlock> = (0..10).map(|_| arena.block(bytes).unwrap()).collect();
    assert!(arena.block(1).is_none() && arena.block(0).is_none());
    let full = ArenaUsage { bytes: 10 * bytes as u64 + 63, lent_bytes: 10 * bytes as u64, refused_blocks: 1 };
    assert_eq!(arena.usage(), full);
    // A copy is in ordinary memory.
    assert!(blocks[0].is_lent() && !blocks[0].clone().is_lent());
    blocks.iter_mut().enumerate().for_each(|(i, block)| block.bytes_mut().fill(i as u8));
    assert!(
        blocks.iter().enumerate().all(|(i, block)| block.bytes() == vec![i as u8; bytes]),
        "none overlap"
    );
    blocks.drain(3..5);
    assert!(arena.block(2 * bytes).is_some(), "neighbours are one piece");
    drop((pools, device));
    std::thread::spawn(move || drop(blocks)).join().unwrap();
    assert_eq!(arena.usage(), ArenaUsage { lent_bytes: 0, ..full });
}

/// A block whose copy failed gives its memory back when the device writes to it no more: late copies harm no other block there.
#[test]
fn memory_of_failed_copies_comes_back_when_they_have_ended() {
    // Two parts, each of twelve sides.
    let (spec, len) = (model("f32", 512, 12).spec(vec![CELLS]), 16);
    let bytes = spec.block_bytes(G, len).unwrap();
    for call in ["cuEventRecord", "cuEventQuery", "cuLaunchKernel", "cuMemcpyDtoHAsync_v2"] {
        let mut n_failed = 0;
        let numbers = [0, 1, 2, 3, 4, 5, 6, 7, 8, 30, 40, 60, 1000];
        for after in numbers {
            let Some(device) = late(&[("KVIST_EMULATION_FAIL", &format!("{call}:1:{after}"))]) else {
                return;
            };
            let mut pools = device.pools(&spec).unwrap();
            let arena = pools.pin_host(2 * bytes as u64).unwrap().unwrap();
            let ended = |pools: &mut dyn Pools, begun: Result<Transfer, TransferRefused>| {
                let transfer = begun?;
                loop {
                    if let Some(ended) = pools.finished(&transfer) {
                        return ended.map(drop);
                    }
                }
            };
            let mut moved = Ok(());
            for out in [false, true, true] {
                let (cells, block) = (CellRun { start: 3, len }, arena.block(bytes).unwrap());
                let begun = match out {
                    true => pools.export(Ticket::START, G, cells, block),
                    false => pools.import(Ticket::START, G, cells, block),
                };
                moved = moved.and(ended(&mut *pools, begun));
            }
            match moved {
                Ok(()) => assert_eq!(pools.counters().bytes_staged, 0),
                Err(DeviceError::Failed { .. }) => n_failed += 1,
                Err(other) => panic!("{call} {after}: {other}"),
            }
            assert_eq!(arena.usage().lent_bytes, 0, "{call} {after}");
            let mut others: Vec<HostBlock> = (0..2).map(|_| arena.block(bytes).unwrap()).collect();
            others.iter_mut().for_each(|block| block.bytes_mut().fill(0x11));
            drop((pools, device));
            let is_whole = |block: &HostBlock| block.bytes().iter().all(|byte| *byte == 0x11);
            assert!(others.iter().all(is_whole), "{call} {after}");
        }
        assert!(n_failed > 0 && n_failed < numbers.len(), "{call} {n_failed}");
    }
}

/// What the system does not lock is an error that changes nothing.
#[test]
fn a_refusal_leaves_the_device_as_it_was() {
    // The first allocation is the driver's own.
    let settings = [("KVIST_EMULATION_FAIL", "cuMemHostAlloc:2:1")];
    let Some(installation) = emulation(&settings) else { return };
    let device = kvist_cuda::open(&installation, None, DETERMINISTIC).unwrap();
    let spec = model("f16", 64, 2).spec(vec![CELLS]);
    let mut pools = device.pools(&spec).unwrap();
    match pools.pin_host(1 << 20) {
        Err(DeviceError::OutOfMemory { what: "pinned memory of blocks", bytes }) => {
            assert_eq!(bytes, 1 << 20)
        }
        other => panic!("{:?}", other.map(|arena| arena.is_some())),
    }
    kvist_gpu::Driver::check(device.driver()).unwrap();
}
