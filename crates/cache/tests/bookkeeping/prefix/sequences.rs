//! Windows, forks and the counts of hits.
use super::*;

/// Regression test: a group of window 1 keeps no blocks, and its presence suppressed every hit, although no query
/// needs anything from it.
#[test]
fn a_window_of_one_asks_for_nothing() {
    let mut spec = spec(4, 400);
    let window = |window| Visibility { window: Some(window), sinks: 0 };
    spec.groups.push(GroupSpec { capacity_tokens: 400, visibility: window(1), max_step_tokens: 1 });
    let prompt = count(41);
    for sinks in [0, 3] {
        spec.groups[1].visibility.sinks = sinks;
        let mut rig = Rig::new(&spec);
        rig.serve("", &Content::Tokens(&prompt[..40]));
        assert_eq!(rig.serve("", &Content::Tokens(&prompt)), 40, "{sinks} sinks");
        rig.prefixes().evict_until_free(u32::MAX, AT);
        assert_eq!(rig.cache.lookup("", &Content::Tokens(&prompt)).hit_tokens, 0);
    }
    // If no group needs any block, a prompt without blocks in any group is not a hit.
    spec.groups[0].visibility = window(1);
    spec.groups[1].visibility = window(1);
    let mut rig = Rig::new(&spec);
    let seq = SeqId(0);
    rig.prefixes().open(seq, "", &Content::Tokens(&prompt), AT).expect("it is new");
    rig.grow(seq, 40);
    rig.prefixes().store(seq, &Content::Tokens(&prompt), AT).expect("it is open");
    assert_eq!(rig.cache.lookup("", &Content::Tokens(&prompt)).hit_tokens, 0);
    // A group with a wider window next to it decides.
    spec.groups[0].visibility = window(5);
    let mut rig = Rig::new(&spec);
    rig.serve("", &Content::Tokens(&prompt[..40]));
    assert_eq!(rig.cache.lookup("", &Content::Tokens(&prompt)).hit_tokens, 40);
    assert_eq!(rig.cache.lookup("", &Content::Tokens(&prompt[..30])).hit_tokens, 0);
}

/// Regression test: a fork of an empty sequence returned `Ok` although its target existed, and the copy belonged to
/// no salt, so other tenants could hit what it stored.
#[test]
fn a_fork_of_an_empty_sequence_is_a_fork() {
    let mut rig = Rig::new(&spec(4, 400));
    let (empty, live, copy, idle) = (SeqId(0), SeqId(1), SeqId(2), SeqId(3));
    let tokens = count(9);
    rig.prefixes().open(empty, "ours", &Content::Tokens(&tokens), AT).expect("it is new");
    rig.prefixes().open(live, "theirs", &Content::Tokens(&tokens), AT).expect("it is new");
    rig.prefixes().open(idle, "theirs", &Content::Tokens(&tokens), AT).expect("it is new");
    rig.grow(live, 9);
    let occupied = Err(Refused::Occupied { seq: live, position: 8 });
    assert_eq!(rig.cache.sequences().expect("many").fork(empty, live), occupied);
    assert_eq!(rig.cache.next_position(live), Some(9));
    assert_eq!(rig.cache.sequences().expect("many").fork(empty, copy), Ok(()));
    assert_eq!(rig.cache.sequences().expect("many").fork(empty, idle), Ok(()), "it holds nothing");
    assert_eq!(rig.cache.sequences().expect("many").seq_cp(live, empty, 3, 3), Ok(()), "an empty range");
    for (seq, salt) in [(copy, "ours"), (idle, "theirs"), (empty, "ours")] {
        rig.grow(seq, 9);
        rig.prefixes().store(seq, &Content::Tokens(&tokens), AT).expect("it is open");
        assert_eq!(rig.cache.lookup(salt, &Content::Tokens(&tokens)).hit_tokens, 8, "{seq} under {salt}");
        assert_eq!(rig.cache.lookup("", &Content::Tokens(&tokens)).hit_tokens, 0, "{seq} is no stranger's");
        rig.cache.sequences().expect("many").seq_rm(seq, 0, u32::MAX).expect("it is open");
        rig.prefixes().evict_until_free(u32::MAX, AT);
    }
}

/// Regression test: hit ratios covered only the whole time since the start, so they did not show how a server does
/// now.
#[test]
fn hits_are_counted_over_the_last_prompts_too() {
    let mut rig = Rig::new(&spec(4, 400));
    assert_eq!(
        (rig.prefixes().report().opened.ratio(), rig.prefixes().report().recent),
        (None, HitCounts::default())
    );
    let n_recent = RECENT_PROMPTS as u64;
    for _ in 0..=n_recent {
        rig.serve("", &Content::Tokens(&count(9)));
    }
    rig.serve("", &Content::Unknown { n_tokens: 7 });
    rig.serve("", &Content::Tokens(&[]));
    let again =
        rig.prefixes().open_again(SeqId(7), "", &Content::Tokens(&count(9)), AT).expect("it is closed");
    assert_eq!(again.hit_tokens, 8);
    rig.cache.sequences().expect("many").seq_rm(SeqId(7), 0, u32::MAX).expect("it is open");
    let report = rig.prefixes().report();
    let counts =
        |n_prompts, hits| HitCounts { n_prompts, prompt_tokens: 9 * n_prompts, hit_tokens: 8 * hits };
    assert_eq!(report.opened, counts(n_recent + 1, n_recent));
    assert_eq!(report.recent, counts(n_recent, n_recent), "the first one, which found nothing, is long ago");
    assert_eq!(report.recent.ratio(), Some(8.0 / 9.0));
    for n in 0..n_recent {
        rig.serve("another", &Content::Tokens(&[n as u32 + 1_000; 3]));
    }
    let recent = HitCounts { n_prompts: n_recent, prompt_tokens: 3 * n_recent, hit_tokens: 0 };
    assert_eq!(rig.prefixes().report().recent, recent);
    assert_eq!(rig.prefixes().report().opened.hit_tokens, 8 * n_recent);
}
