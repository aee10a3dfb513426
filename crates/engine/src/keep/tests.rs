use super::*;

#[test]
fn budgets_are_read_and_written() {
    let keep = |sinks, recent, top_k, by| KeepConfig { keep: Keep { sinks, recent, top_k }, by };
    for (text, expected) in [
        ("sinks=4,recent=1024,top=2048", keep(4, 1024, 2048, KeepBy::Last)),
        ("recent=1", keep(0, 1, 0, KeepBy::None)),
        (" top = 2 , by = last , recent = 8 ", keep(0, 8, 2, KeepBy::Last)),
        ("recent=8,by=none,top=9", keep(0, 8, 9, KeepBy::None)),
    ] {
        assert_eq!(text.parse(), Ok(expected), "{text}");
        assert_eq!(expected.to_string().parse(), Ok(expected), "{text}, written and read");
    }
    for (bad, words) in [
        ("", "NAME=VALUE"),
        ("sinks", "NAME=VALUE"),
        ("sinks=4", "`recent` is missing"),
        ("recent=0", "1 or more"),
        ("recent=-1", "`-1`"),
        ("recent=+1", "`+1`"),
        ("recent=1.5", "`1.5`"),
        ("recent=", "``"),
        ("recent=99999999999", "`99999999999`"),
        ("recent=999999999", "268435456"),
        ("recent=1,recent=2", "twice"),
        ("recent=1,by=none,by=none", "twice"),
        ("recent=1,bottom=2", "`bottom`"),
        ("recent=1,by=luck", "`luck`"),
        ("recent=1,by=last", "give top=TOKENS"),
        ("recent=1,top=0,by=attention", "give top=TOKENS"),
        ("recent=1,,top=2", "NAME=VALUE"),
    ] {
        let error = bad.parse::<KeepConfig>().expect_err(bad);
        assert!(error.contains(words), "{bad}: {error}");
    }
    assert_eq!(keep(1, 2, 3, KeepBy::None).budget(1), 6);
    assert_eq!(keep(u32::MAX, 2, 3, KeepBy::None).budget(16), u32::MAX, "no overflow");
}

#[test]
fn the_last_queries_are_the_newest() {
    let mut received = Received::default();
    let by = KeepBy::Last;
    received.observe(by, OBSERVED, vec![(0, 7.0)]);
    assert_eq!(received.steps.len(), 1);
    for i in 1..=OBSERVED {
        received.observe(by, 1, vec![(0, 1.0), (i, 2.0)]);
        let observed: u32 = received.steps.iter().map(|(n, _)| n).sum();
        assert!(observed >= OBSERVED, "{observed} queries after {i} more");
    }
    assert_eq!(received.steps.len() as u32, OBSERVED, "the long step is forgotten");
    received.truncate(3);
    let stored = [0..2, 5..6];
    let scores = received.scores(KeepBy::Attention, &stored); // as summed, not pooled
    let expected = [(0, OBSERVED as f32), (1, 2.0), (5, 0.0)];
    assert_eq!(scores.iter().map(|s| (s.position, s.importance)).collect::<Vec<_>>(), expected);
    let pooled = received.scores(by, &stored);
    assert!(pooled.iter().all(|s| s.importance == OBSERVED as f32), "neighbours of the strongest");
}

#[test]
fn sums_add_up_position_by_position() {
    let mut sum = vec![(1, 1.0), (4, 2.0)];
    add(&mut sum, &[(0, 5.0), (4, 3.0), (9, 1.0)]);
    assert_eq!(sum, [(0, 5.0), (1, 1.0), (4, 5.0), (9, 1.0)]);
    add(&mut sum, &[]);
    assert_eq!(sum.len(), 4);
}
