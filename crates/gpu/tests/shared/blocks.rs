//! Blocks of many cells: they are moved in parts, several at once, and keep their bytes.
use crate::common::device;
use crate::decoding::Model;
use kvist_cache::{CellRun, GroupId};
use kvist_device::*;
use kvist_testing::SplitMix64;

const CELLS: u32 = 700;
/// First cell and number of cells. The first has more parts than transfers have slots.
const BLOCKS: [(u32, u32); 5] = [(3, 300), (303, 64), (367, 1), (370, 65), (500, 200)];

fn finish(pools: &mut dyn Pools, transfer: &Transfer) -> HostBlock {
    loop {
        if let Some(block) = pools.finished(transfer) {
            return block.unwrap();
        }
        std::thread::yield_now();
    }
}

#[test]
fn large_blocks_keep_their_bytes() {
    let Some(device) = device() else { return };
    // Rows of 33 elements: sides of an odd number of bytes.
    for (storage, head_dim) in [("f16", 33), ("q4-64", 33), ("t4-o", 64), ("f32", 512)] {
        let storage: Storage = storage.parse().unwrap();
        let model = Model {
            k: storage,
            v: storage,
            heads: (3, 3),
            head_dim,
            n_layers: 2,
            max_step_tokens: 8,
            budget: MemoryBudget::new(1 << 30),
            ..Model::default()
        };
        let spec = model.spec(vec![CELLS]);
        let mut pools = device.pools(&spec).unwrap();
        let mut random = SplitMix64(3);
        let blocks = BLOCKS.map(|(start, len)| {
            let mut block = HostBlock::new(spec.block_bytes(GroupId(0), len).unwrap()).unwrap();
            block.bytes_mut().fill_with(|| random.next() as u8);
            (CellRun { start, len }, block)
        });
        // All are on their way at once.
        let transfers =
            blocks.clone().map(|(run, block)| pools.import(Ticket::START, GroupId(0), run, block).unwrap());
        for (transfer, (_, block)) in transfers.iter().zip(&blocks) {
            assert!(finish(&mut *pools, transfer) == *block, "an import gives its block back");
        }
        let transfers = blocks.each_ref().map(|(run, block)| {
            let empty = HostBlock::new(block.bytes().len()).unwrap();
            pools.export(Ticket::START, GroupId(0), *run, empty).unwrap()
        });
        for (transfer, (run, block)) in transfers.iter().zip(&blocks) {
            assert!(finish(&mut *pools, transfer) == *block, "{storage} {head_dim} {run:?}");
        }
        // The memory of transfers is in the plan, used or not.
        assert_eq!(Some(spec.budget.usage()), device.usage(&spec, &[CELLS]), "{storage} {head_dim}");
        drop(pools);
        assert_eq!(spec.budget.usage(), Usage::default());
    }
}
