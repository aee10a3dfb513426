//! Hits, and why they are not longer.
use super::*;

/// A hit is rounded down to whole blocks, and the last token is always computed. Rounding up would give a hit of 64
/// tokens in a prompt of 50.
#[test]
fn hits_are_whole_blocks_and_never_the_last_token() {
    let mut rig = Rig::new(&spec(16, 1024));
    assert_eq!(rig.serve("", &Content::Tokens(&count(64))), 0);
    for (n_tokens, hit) in
        [(1, 0), (15, 0), (16, 0), (17, 16), (32, 16), (33, 32), (50, 48), (64, 48), (65, 64), (200, 64)]
    {
        let found = rig.cache.lookup("", &Content::Tokens(&count(n_tokens)));
        assert_eq!(found.hit_tokens, hit, "a prompt of {n_tokens} tokens");
    }
}

#[test]
fn a_miss_says_why() {
    use Viewer::{Operator, Tenant};
    let mut rig = Rig::new(&spec(4, 40));
    let served = count(12);
    rig.serve("ours", &Content::Tokens(&served));
    let diverging = |at: u32| (0..12).map(|t| if t < at { t } else { t + 100 }).collect::<Vec<u32>>();

    let unaligned = MissReason::UnalignedTail { position: 8 };
    assert_eq!(rig.why("ours", &count(11), Tenant), unaligned, "less than a block is left");
    assert_eq!(rig.why("ours", &served, Tenant), unaligned, "the last token is always computed");
    assert_eq!(
        rig.why("ours", &count(20), Tenant),
        MissReason::NeverSeen { position: 12 },
        "no prompt continues there"
    );
    for at in [1, 3, 4, 6, 7] {
        let diverged = MissReason::Diverged { position: at };
        assert_eq!(rig.why("ours", &diverging(at), Tenant), diverged, "first other token at {at}");
    }
    let never = MissReason::NeverSeen { position: 0 };
    assert_eq!(rig.why("ours", &diverging(0), Tenant), never, "nothing in common");
    assert_eq!(rig.why("theirs", &served, Tenant), never, "a tenant must not learn what others ask");
    assert_eq!(rig.why("theirs", &served, Operator), MissReason::OtherSalt { position: 0 });

    // The prompt's blocks are evicted, last block first.
    assert_eq!(rig.prefixes().evict_until_free(32, AT), 1);
    assert_eq!(rig.why("ours", &count(20), Tenant), MissReason::Evicted { position: 8 });
    assert_eq!(rig.prefixes().evict_until_free(40, AT), 2);
    assert_eq!(rig.why("ours", &count(20), Tenant), MissReason::Evicted { position: 0 });
    assert_eq!(rig.prefixes().report().n_salts, 0, "a salt without blocks and sequences is forgotten");
}

/// The window group has dropped blocks that the next query would see, while the full-attention group still has them.
#[test]
fn a_window_that_has_moved_on_is_a_reason() {
    let mut spec = spec(4, 400);
    let window = Visibility { window: Some(5), sinks: 0 };
    spec.groups.push(GroupSpec { capacity_tokens: 400, visibility: window, max_step_tokens: 1 });
    let mut rig = Rig::new(&spec);
    rig.serve("", &Content::Tokens(&count(40)));
    // Once the prompt was computed, its window group had dropped everything before position 36.
    let longer = count(41);
    assert_eq!(rig.cache.lookup("", &Content::Tokens(&longer)).hit_tokens, 40);
    let middle = Content::Tokens(&longer[..30]);
    assert_eq!(rig.cache.lookup("", &middle).hit_tokens, 0);
    assert_eq!(rig.cache.explain("", &middle, Viewer::Tenant), MissReason::WindowGone { position: 0 });
}

/// With 512 tokens per id, an id covers 32 blocks of 16. With 8 tokens per id, two ids make one block.
#[test]
fn trace_ids_are_cut_into_blocks() {
    for (tokens_per_id, block_tokens, hit) in [(512, 16, 1024), (512, 512, 1024), (8, 16, 16), (16, 16, 32)] {
        let mut spec = spec(block_tokens, 8192);
        let vocabulary = Vocabulary::Ids { tokens_per_id };
        spec.prefix = Some(PrefixSpec { vocabulary, ..PrefixSpec::default() });
        let mut rig = Rig::new(&spec);
        let content = |ids: &'static [u64], n_tokens| Content::Ids { ids, tokens_per_id, n_tokens };
        let n_tokens = 3 * tokens_per_id - 1;
        rig.serve("", &content(&[7, u64::MAX, 9], n_tokens));
        let longer = content(&[7, u64::MAX, 10, 11, 12, 13], 6 * tokens_per_id);
        assert_eq!(
            rig.cache.lookup("", &longer).hit_tokens,
            hit,
            "{tokens_per_id} in blocks of {block_tokens}"
        );
        let n_tokens = 6 * tokens_per_id;
        let coarser = Content::Ids { ids: &[7, u64::MAX, 10], tokens_per_id: 2 * tokens_per_id, n_tokens };
        assert_eq!(rig.cache.lookup("", &coarser).hit_tokens, 0, "ids of another size are other ids");
        let other = Content::Tokens(&[7; 64]);
        assert!(rig.prefixes().open(SeqId(99), "", &other, AT).is_err(), "content of another kind");
    }
    let mut odd = spec(24, 240);
    odd.prefix =
        Some(PrefixSpec { vocabulary: Vocabulary::Ids { tokens_per_id: 16 }, ..PrefixSpec::default() });
    let refused = Cache::paged(&odd).err().expect("24 and 16 do not fit").to_string();
    assert!(refused.contains("24") && refused.contains("16"), "{refused}");
}
