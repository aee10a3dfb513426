//! Loads in arenas and in a paged cache: cases computed by hand, and properties of every load.
use kvist_simulator::arena::{PAGED, ReplayRefused, Replayed, Reserve, Setting, layouts, replay};
use kvist_simulator::request::Request;
use kvist_simulator::workload::{Arrivals, Chats, Contents, Lengths, Workload};

/// Blocks of 4 tokens; a token every second.
fn setting(capacity_blocks: u32, reserve: Reserve) -> Setting {
    Setting { block_tokens: 4, capacity_blocks, token_ns: 1_000_000_000, reserve }
}

fn by_hand(requests: &[Request], layout: &str, capacity: u32, reserve: Reserve) -> Replayed {
    replay(requests, layout, &setting(capacity, reserve)).unwrap()
}

/// The first sequence fills its block, and the second is placed directly after it.
#[test]
fn by_hand_a_neighbour_is_in_the_way() {
    // Prompts of one block each. The first request generates 3 tokens, of which 2 are stored, at 1 s and 2 s; it ends
    // at 3 s. The other ends at 1 s, after the first's token.
    let requests = [Request::new(0, 0, 4, 3), Request::new(1, 0, 4, 1)];
    // Of three blocks only the third is free, but two contiguous ones are needed.
    for layout in ["first_fit", "buddy"] {
        let found = by_hand(&requests, layout, 3, Reserve::Prompt);
        assert_eq!((found.finished, found.cut_short, found.cut_short_with_room), (1, 1, 1), "{layout}");
    }
    let paged = by_hand(&requests, PAGED, 3, Reserve::Prompt);
    assert_eq!((paged.finished, paged.cut_short, paged.peak_used_blocks), (2, 0, 3));
    // 2 blocks for 1 s, then 3 until the other frees its block at the same moment, then 2 for two seconds.
    assert!((paged.mean_used_blocks - 2.0).abs() < 1e-12, "{paged:?}");
    // 8, 5 and 6 tokens are stored, in space for 8 each.
    assert!((paged.internal_fragmentation - (1.0 - 19.0 / 24.0)).abs() < 1e-12, "{paged:?}");
    // Of four blocks, two contiguous ones are free: the first sequence moves there, with its block.
    for layout in ["first_fit", "buddy"] {
        let found = by_hand(&requests, layout, 4, Reserve::Prompt);
        assert_eq!((found.finished, found.moved, found.blocks_copied), (2, 1, 1), "{layout}: {found:?}");
        assert_eq!((found.grown_in_place, found.peak_used_blocks), (0, 3), "{layout}: {found:?}");
    }
    // If space for the answer is reserved from the start, no sequence moves.
    let whole = by_hand(&requests, "first_fit", 3, Reserve::Whole);
    assert_eq!((whole.finished, whole.moved, whole.grown_in_place), (2, 0, 0));
    // In use: blocks 0 and 1, and 2. The free piece is at the end and contains all free blocks.
    assert_eq!(whole.external_fragmentation, 0.0);
}

#[test]
fn by_hand_pieces_are_not_a_handle() {
    // Four requests of one block each; the first and third leave at 1 s. At 2 s another request needs two blocks: two
    // are free but not contiguous.
    let mut requests: Vec<Request> =
        (0..4).map(|i| Request::new(i, 0, 4, if i % 2 == 0 { 1 } else { 9 })).collect();
    for request in requests.iter_mut().filter(|request| request.id % 2 == 1) {
        request.prompt_tokens = 1; // so that its answer fits into its block until 4 s
        request.output_tokens = 4;
    }
    requests.push(Request::new(9, 2_000_000_000, 8, 1));
    for (layout, turned_away) in [("first_fit", 1), ("buddy", 1), (PAGED, 0)] {
        let found = by_hand(&requests, layout, 4, Reserve::Prompt);
        assert_eq!(
            (found.turned_away, found.turned_away_with_room, found.finished),
            (turned_away, turned_away, 5 - turned_away),
            "{layout}"
        );
        // From 1 s to 4 s two blocks are free, but the largest piece is one: a half, for three of four seconds.
        let external = if layout == PAGED { 0.0 } else { 0.375 };
        assert!((found.external_fragmentation - external).abs() < 1e-12, "{found:?}");
    }
    // Two requests of three blocks each in six blocks: buddy takes four for the first, which leaves two for the
    // second.
    let three = [Request::new(0, 0, 9, 1), Request::new(1, 0, 9, 1)];
    for (layout, turned_away) in [("first_fit", 0), ("buddy", 1), (PAGED, 0)] {
        let found = by_hand(&three, layout, 6, Reserve::Prompt);
        assert_eq!(found.turned_away, turned_away, "{layout}");
        assert_eq!(found.turned_away_with_room, 0, "two blocks are free, three are asked");
    }
}

#[test]
fn of_any_load() {
    for (seed, capacity) in [(1, 60), (2, 200), (3, 700), (4, 1 << 14)] {
        let workload = Workload {
            n_requests: 200,
            arrivals: Arrivals::Poisson { per_s: 0.5 },
            prompt_tokens: Lengths::Lognormal { mean: 60.0, variation: 1.5 },
            output_tokens: Lengths::Lognormal { mean: 40.0, variation: 1.0 },
            contents: Contents::Chats(Chats {
                turns: Lengths::Uniform { min: 1, max: 4 },
                think_s: 5.0,
                system_tokens: 20,
                tokens_per_id: 4,
            }),
        };
        let requests = workload.generate(seed).unwrap();
        for reserve in [Reserve::Prompt, Reserve::Whole] {
            let run = |layout: &str| replay(&requests, layout, &setting(capacity, reserve)).unwrap();
            let all: Vec<Replayed> = layouts().map(run).collect();
            let what = format!("seed {seed}, {capacity} blocks, {reserve:?}");
            for found in &all {
                let ends = found.finished + found.turned_away + found.cut_short;
                assert_eq!(ends, requests.len() as u64, "{what}: {found:?}");
                assert!(found.turned_away_with_room <= found.turned_away, "{what}: {found:?}");
                assert!(found.cut_short_with_room <= found.cut_short, "{what}: {found:?}");
                assert!(found.blocks_copied >= found.moved && found.peak_used_blocks <= capacity, "{what}");
                for ratio in [found.internal_fragmentation, found.external_fragmentation] {
                    assert!((0.0..1.0).contains(&ratio), "{what}: {found:?}");
                }
                if reserve == Reserve::Whole {
                    assert_eq!((found.moved, found.grown_in_place), (0, 0), "{what}: {found:?}");
                }
                assert_eq!(*found, run(&found.layout), "the same again");
            }
            let [first_fit, buddy, paged] = &all[..] else { panic!("three layouts") };
            assert_eq!((paged.turned_away_with_room, paged.cut_short_with_room), (0, 0), "{what}");
            assert_eq!(paged.external_fragmentation, 0.0);
            if capacity == 1 << 14 {
                // Space for all: the layouts differ only in what they waste and move.
                assert!(all.iter().all(|found| found.finished == found.requests), "{what}: {all:?}");
                assert!(buddy.internal_fragmentation > first_fit.internal_fragmentation, "{what}");
                if reserve == Reserve::Prompt {
                    let apart = first_fit.internal_fragmentation - paged.internal_fragmentation;
                    assert!(apart.abs() < 1e-12 && first_fit.moved > 0, "{what}: {all:?}");
                    assert!(buddy.moved < first_fit.moved, "what is rounded up is room to grow: {all:?}");
                }
            } else {
                assert!(paged.turned_away + paged.cut_short > 0 || capacity > 200, "{what}: {paged:?}");
            }
        }
    }
}

#[test]
fn refused() {
    let good = setting(4, Reserve::Prompt);
    let found = replay(&[], "slab", &good).unwrap_err().to_string();
    assert!(found.contains("`slab`") && found.contains("first_fit, buddy, paged"), "{found}");
    for (capacity_blocks, block_tokens) in [(0, 4), (4, 0), (u32::MAX, 1), (1 << 24, 256)] {
        let found = replay(&[], PAGED, &Setting { capacity_blocks, block_tokens, ..good });
        assert_eq!(found, Err(ReplayRefused::BadSize { capacity_blocks, block_tokens }));
    }
    assert_eq!(replay(&[], "buddy", &good).unwrap().requests, 0);
}
