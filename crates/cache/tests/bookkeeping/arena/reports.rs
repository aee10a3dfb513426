//! Reports, maps and events.
use super::layout::SEVEN_B;
use super::simulation::Simulation;
use super::*;

/// The source's dump: four sequences in 60 blocks. It reported 2048 MB of 8 GB; the correct figures are 480 MiB of 16
/// GiB.
#[test]
fn the_dump_has_right_figures() {
    let mut it = Simulation::new("first_fit", 2048, 16);
    for (seq, tokens) in [(1, 512), (2, 256), (3, 128), (4, 64)] {
        it.allocate(SeqId(seq), tokens, OutOfMemory::Reject).unwrap();
        it.append(SeqId(seq), tokens, CapacityExceeded::Error, true).unwrap();
    }
    let text = it.arena.report().text(Some((&SEVEN_B, 4))).to_string();
    let (head, map) = text.split_at(text.find("block map").unwrap());
    assert_eq!(
        head,
        "blocks: 60 of 2048 used, 1988 free, 16 tokens each (first_fit)\n\
         bytes: 480.00 MiB of 16.00 GiB used, 15.53 GiB free\n\
         fragmentation: external 0.00 (largest free run 1988 of 1988), internal 0.00\n\
         so far: 4 allocated, 0 freed, 0 evicted, 0 refused, 0 halted, 0 grown, 0 blocks copied\n\
         sequences: 4\n  \
           a 1: 512 of 512 tokens, blocks 0..32\n  \
           b 2: 256 of 256 tokens, blocks 32..48\n  \
           c 3: 128 of 128 tokens, blocks 48..56\n  \
           d 4: 64 of 64 tokens, blocks 56..60\n"
    );
    let lines: Vec<&str> = map.lines().collect();
    assert_eq!(lines.len(), 1 + 32);
    let first: String =
        ["a".repeat(32), "b".repeat(16), "c".repeat(8), "d".repeat(4), ".".repeat(4)].concat();
    assert_eq!(lines[1].trim_start(), format!("0 {first}"));
    assert_eq!(lines[32].trim_start(), format!("{} {}", 2048 - 64, ".".repeat(64)));
}

/// A map that would not fit on a page shows groups of blocks. Blocks that a buddy allocator reserves are shown as
/// their sequence's.
#[test]
fn large_maps_are_grouped() {
    let mut it = Simulation::new("buddy", 8192, 1);
    it.allocate(A, 5, OutOfMemory::Reject).unwrap();
    it.allocate(B, 2, OutOfMemory::Reject).unwrap();
    let text = it.arena.report().text(None).to_string();
    assert!(!text.contains("bytes:"), "{text}");
    assert!(text.contains("  a 1: 0 of 5 tokens, blocks 0..5, reserved up to 8\n"), "{text}");
    assert!(text.contains("4 blocks per character"), "{text}");
    let row = text.lines().find(|line| line.trim_start().starts_with("0 ")).unwrap();
    assert_eq!(row.trim_start(), format!("0 aa+{}", ".".repeat(61)));
}

/// Block events are neither reported nor stored unless recording is on.
#[test]
fn the_log_is_off_until_it_is_asked_for() {
    let mut arena = Arena::new(4, build("first_fit", 8)).unwrap();
    let log = |arena: &mut Arena| {
        let mut events = Vec::new();
        arena.drain_events(&mut events);
        events.iter().map(|e| (e.block, e.change.name(), e.reason.name())).collect::<Vec<_>>()
    };
    arena.allocate_for(A, 8, OutOfMemory::Reject).unwrap();
    assert_eq!(log(&mut arena), []);
    arena.watch(true);
    arena.allocate_for(B, 4, OutOfMemory::Reject).unwrap();
    arena.append(A, 5, CapacityExceeded::Error).unwrap().unwrap().commit();
    arena.append(A, 4, CapacityExceeded::Error).unwrap().unwrap().commit();
    assert_eq!(
        log(&mut arena),
        [
            (2, "alloc", "open"),
            (0, "free", "append"),
            (1, "free", "append"),
            (3, "move", "append"),
            (4, "move", "append"),
            (5, "alloc", "append"),
        ]
    );
    arena.watch(false);
    arena.free_for(B).unwrap();
    assert_eq!(log(&mut arena), []);
}
