//! Slots of recurrent states under random operations. The reference model keeps each sequence's state itself.
use kvist_cache::{GroupId, Refused, SeqId, StateMove, StateSlots};
use kvist_testing::SplitMix64;
use std::collections::{BTreeMap, BTreeSet};

#[test]
fn a_sequence_has_its_own_state_whatever_happens_to_steps_and_forks() {
    for seed in 0..40 {
        let mut random = SplitMix64(seed);
        let n_slots = 1 + random.next() as u32 % 7;
        let mut slots = StateSlots::new(GroupId(3), n_slots);
        // The device's memory, and the state that every sequence must have.
        let mut memory = vec![0u64; n_slots as usize];
        let mut states: BTreeMap<SeqId, u64> = BTreeMap::new();
        let mut moves = Vec::new();
        for step in 1..400u64 {
            let mut seq = || SeqId((random.next() % 5) as u32);
            let (a, b) = (seq(), seq());
            let used: BTreeSet<u32> = states.keys().map(|seq| slots.slot(*seq).unwrap()).collect();
            let n_free = n_slots - used.len() as u32;
            assert_eq!(slots.n_free(), n_free);
            match random.next() % 6 {
                0 => {
                    slots.remove(a);
                    states.remove(&a);
                }
                1 => {
                    let expected = match (states.get(&a).copied(), states.contains_key(&b)) {
                        (None, _) => Err(Refused::UnknownSequence(a)),
                        (_, true) => Err(Refused::SequenceExists(b)),
                        (Some(state), false) => {
                            states.insert(b, state);
                            Ok(())
                        }
                    };
                    assert_eq!(slots.fork(a, b), expected);
                }
                end => {
                    let seqs = [a, b];
                    let seqs = &seqs[..1 + random.next() as usize % 2];
                    let needed = seqs.len() as u32;
                    let expected = match seqs {
                        [a, b] if a == b => Err(Refused::TwoSpansOfOneSequence(*b)),
                        _ if needed > n_free => {
                            Err(Refused::NoSpace { group: GroupId(3), needed, free: n_free, reclaimable: 0 })
                        }
                        _ => Ok(()),
                    };
                    assert_eq!(slots.prepare(seqs, &mut moves), expected);
                    assert_eq!(moves.len(), if expected.is_ok() { seqs.len() } else { 0 });
                    let next = |state: u64| state.wrapping_mul(31).wrapping_add(step);
                    for (StateMove { seq, from, to }, expected) in moves.iter().zip(seqs) {
                        assert_eq!((seq, *from), (expected, slots.slot(*seq)));
                        memory[*to as usize] = next(from.map_or(0, |from| memory[from as usize]));
                    }
                    // A quarter of the steps is abandoned.
                    if end != 2 {
                        slots.commit(&moves);
                        for StateMove { seq, .. } in &moves {
                            let state = states.entry(*seq).or_default();
                            *state = next(*state);
                        }
                    }
                }
            }
            for seq in (0..5).map(SeqId) {
                let found = slots.slot(seq).map(|slot| memory[slot as usize]);
                assert_eq!(found, states.get(&seq).copied(), "seed {seed}, step {step}, {seq}");
            }
        }
    }
}

#[test]
#[should_panic(expected = "the moves of an earlier step")]
fn moves_are_committed_once() {
    let (mut slots, mut moves) = (StateSlots::new(GroupId(0), 2), Vec::new());
    slots.prepare(&[SeqId(0)], &mut moves).unwrap();
    slots.commit(&moves);
    slots.commit(&moves);
}
