//! What wanted rows give back, compared with plain computations.
use kvist_device::{HostSampler, NoToken, RowOutput, RowResult, SampleParams, StepOutput, WantedRow};
use kvist_testing::SplitMix64;

/// Tokens and logits in descending order, equal ones by id.
fn sorted(logits: &[f32]) -> Vec<(u32, f32)> {
    let mut all: Vec<(u32, f32)> = (0u32..).zip(logits.iter().copied()).collect();
    all.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    all
}

/// Coarse values, so that many are equal.
fn logits(random: &mut SplitMix64, n: usize) -> Vec<f32> {
    (0..n).map(|_| (random.next() % 40) as f32 * 0.25 - 5.0).collect()
}

fn answers(rows: &[WantedRow], logits: &[Vec<f32>]) -> (StepOutput, Vec<String>) {
    let mut output = StepOutput::default();
    output.want(rows);
    let vocab = logits.first().map_or(0, Vec::len);
    for (to, from) in output.all_logits(vocab).chunks_exact_mut(vocab.max(1)).zip(logits) {
        to.copy_from_slice(from);
    }
    output.answer_rows();
    let answers = output.rows().map(|row| format!("{row:?}")).collect();
    (output, answers)
}

#[test]
fn each_row_gives_what_it_asked_for() {
    let mut random = SplitMix64(7);
    for round in 0..200 {
        let vocab = 1 + random.next() as usize % 300;
        let n_rows = 1 + random.next() as usize % 5;
        let all: Vec<Vec<f32>> = (0..n_rows).map(|_| logits(&mut random, vocab)).collect();
        let (mut wanted, mut expected, mut copied) = (Vec::new(), Vec::new(), Vec::new());
        for (row, logits) in all.iter().enumerate() {
            let sorted = sorted(logits);
            let output = match random.next() % 4 {
                0 => RowOutput::Logits,
                1 => RowOutput::TopK([0, 1, 5, 1000][random.next() as usize % 4]),
                2 => RowOutput::Argmax,
                // Without a temperature, a sample is the most likely token.
                _ => RowOutput::Sample(SampleParams {
                    temperature: 0.0,
                    top_k: 3,
                    top_p: 0.5,
                    min_p: 0.1,
                    uniform: 0.9,
                }),
            };
            expected.push(match output {
                RowOutput::Logits => {
                    copied.extend_from_slice(logits);
                    format!("{:?}", RowResult::Logits(&mut logits.clone()))
                }
                RowOutput::TopK(k) => {
                    format!("{:?}", RowResult::TopK(&sorted[..vocab.min(k as usize)]))
                }
                _ => format!("{:?}", RowResult::Token(sorted[0].0)),
            });
            wanted.push(WantedRow { row: row as u32, output });
        }
        let (output, found) = answers(&wanted, &all);
        assert_eq!(found, expected, "round {round}: {wanted:?}");
        assert_eq!(output.logits(), copied, "round {round}: the logits that were asked for, in order");
    }
}

/// Draws on several threads give what draws one after the other give.
#[test]
fn rows_are_drawn_in_any_order() {
    let mut random = SplitMix64(13);
    for round in 0..100 {
        let all: Vec<Vec<f32>> = (0..6).map(|_| logits(&mut random, 80)).collect();
        let output = |random: &mut SplitMix64| match random.next() % 4 {
            0 => RowOutput::Logits,
            1 => RowOutput::TopK(5),
            2 => RowOutput::Argmax,
            _ => RowOutput::Sample(SampleParams {
                temperature: 1.3,
                top_k: (random.next() % 30) as u32,
                top_p: 0.9,
                min_p: 0.01,
                uniform: random.index(1000) as f32 / 1000.0,
            }),
        };
        let wanted: Vec<_> = (0..6).map(|row| WantedRow { row, output: output(&mut random) }).collect();
        let (mut output, expected) = answers(&wanted, &all);
        output.want(&wanted);
        output.all_logits(80).copy_from_slice(&all.concat());
        output.answer_rows_on(|drawn, draw| {
            std::thread::scope(|scope| {
                for (row, drawn) in drawn.iter_mut().enumerate().rev() {
                    scope.spawn(move || draw(row, drawn, &mut HostSampler::default()));
                }
            });
        });
        let found: Vec<_> = output.rows().map(|row| format!("{row:?}")).collect();
        assert_eq!(found, expected, "round {round}: {wanted:?}");
        // A row that no thread drew gives no token.
        output.want(&wanted);
        output.all_logits(80).copy_from_slice(&all.concat());
        output.answer_rows_on(|_, _| ());
        for (WantedRow { output, .. }, row) in wanted.iter().zip(output.rows()) {
            let draws = matches!(output, RowOutput::Argmax | RowOutput::Sample(_));
            assert_eq!(row == RowResult::Failed(NoToken::NoLogits), draws, "round {round}");
        }
    }
}

#[test]
fn a_row_without_a_token_says_why_and_the_others_are_answered() {
    let of = |output| WantedRow { row: 0, output };
    let sample = SampleParams { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0, uniform: 0.5 };
    let wanted =
        [RowOutput::Argmax, RowOutput::TopK(2), RowOutput::Sample(sample), RowOutput::Argmax].map(of);
    let nan = vec![0.0, f32::NAN, 1.0];
    let (_, found) = answers(&wanted, &[nan.clone(), nan.clone(), nan, vec![f32::NEG_INFINITY; 3]]);
    let failed = format!("{:?}", RowResult::Failed(NoToken::Nan));
    assert_eq!(found, [failed.clone(), failed.clone(), failed, format!("{:?}", RowResult::Token(0))]);
    let (_, found) = answers(&wanted[..1], &[]);
    assert_eq!(found, [format!("{:?}", RowResult::Failed(NoToken::NoLogits))]);
    // Wanted, but not answered yet.
    let mut output = StepOutput::default();
    output.want(&wanted);
    assert_eq!((output.rows().count(), output.wanted().len()), (0, 4));
}

/// The share of the probability that lies before each token: `(token, from, until)`, in descending order.
fn shares(logits: &[f32], params: &SampleParams) -> Vec<(u32, f64, f64)> {
    let mut kept = sorted(logits);
    let max = f64::from(kept[0].1);
    if params.top_k > 0 {
        kept.truncate(params.top_k as usize);
    }
    let weight = |x: f32, temperature: f32| ((f64::from(x) - max) / f64::from(temperature)).exp();
    let total: f64 = kept.iter().map(|(_, x)| weight(*x, 1.0)).sum();
    let (mut n, mut sum) = (0, 0.0);
    for (_, x) in &kept {
        if n > 0 && (sum >= f64::from(params.top_p) || weight(*x, 1.0) < f64::from(params.min_p)) {
            break;
        }
        sum += weight(*x, 1.0) / total;
        n += 1;
    }
    kept.truncate(n);
    let total: f64 = kept.iter().map(|(_, x)| weight(*x, params.temperature)).sum();
    let mut before = 0.0;
    kept.iter()
        .map(|(token, x)| {
            let from = before;
            before += weight(*x, params.temperature) / total;
            (*token, from, before)
        })
        .collect()
}

#[test]
fn samples_follow_the_distribution() {
    let mut random = SplitMix64(11);
    let mut sampler = HostSampler::default();
    for _ in 0..60 {
        let logits = logits(&mut random, 50);
        let mut pick = |from: &[f32]| from[random.next() as usize % from.len()];
        let mut params = SampleParams {
            temperature: pick(&[0.3, 1.0, 2.5]),
            top_k: pick(&[0.0, 1.0, 7.0]) as u32,
            top_p: pick(&[1.0, 0.83, 0.31]),
            min_p: pick(&[0.0, 0.07]),
            uniform: 0.0,
        };
        let shares = shares(&logits, &params);
        for i in 0..500 {
            params.uniform = i as f32 / 500.0;
            assert_eq!(params.check(), Ok(()));
            let token = sampler.sample(&logits, &params).unwrap();
            let (_, from, until) = shares.iter().find(|(known, ..)| *known == token).copied().unwrap();
            // A sum in f32 may differ at the edges.
            let u = f64::from(params.uniform);
            assert!(from - 1e-4 <= u && u <= until + 1e-4, "{params:?}: {token} has {from}..{until}");
        }
    }
}

#[test]
fn parameters_out_of_range_are_refused() {
    let good = SampleParams { temperature: 0.7, top_k: 0, top_p: 1.0, min_p: 0.0, uniform: 0.0 };
    assert_eq!(good.check(), Ok(()));
    for (bad, what) in [
        (SampleParams { temperature: -0.1, ..good }, "temperature"),
        (SampleParams { temperature: f32::NAN, ..good }, "temperature"),
        (SampleParams { top_p: 0.0, ..good }, "top-p"),
        (SampleParams { top_p: f32::NAN, ..good }, "top-p"),
        (SampleParams { min_p: 1.5, ..good }, "min-p"),
        (SampleParams { uniform: 1.0, ..good }, "random number"),
        (SampleParams { uniform: f32::NAN, ..good }, "random number"),
    ] {
        let why = bad.check().unwrap_err();
        assert!(why.contains(what), "{bad:?}: {why}");
    }
}
