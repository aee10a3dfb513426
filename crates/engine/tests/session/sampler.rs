//! The sampler against a reference implementation written directly from the documented order, and properties that users
//! rely on.
use kvist_device::{RowOutput, RowResult, StepOutput, WantedRow};
use kvist_engine::sampler::{Sampler, SamplerConfig};
use kvist_engine::text::StopMatcher;
use kvist_testing::SplitMix64;

/// A simple reference distribution: (token, probability), most likely first.
struct Distribution {
    kept: Vec<(u32, f64)>,
    /// True if a threshold is so close to a sum that rounding decides.
    uncertain: bool,
}

/// `text` is everything so far; `drawn` the part of it that the sampler drew.
fn reference(config: &SamplerConfig, logits: &[f32], text: &[u32], drawn: &[u32]) -> Distribution {
    let mut logits: Vec<f64> = logits.iter().map(|x| f64::from(*x)).collect();
    // 1. repetition penalty, each recent token once
    let recent = &text[text.len() - config.repetition_window.min(text.len())..];
    let penalty = f64::from(config.repetition_penalty);
    for (token, logit) in logits.iter_mut().enumerate() {
        if recent.contains(&(token as u32)) {
            *logit = if *logit > 0.0 { *logit / penalty } else { *logit * penalty };
        }
        // frequency and presence
        let times = drawn.iter().filter(|t| **t == token as u32).count() as f64;
        *logit -= times * f64::from(config.frequency_penalty);
        if times > 0.0 {
            *logit -= f64::from(config.presence_penalty);
        }
    }
    let mut order: Vec<u32> = (0..logits.len() as u32).collect();
    order.sort_by(|a, b| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b)));
    // 2. top-k
    if config.top_k > 0 {
        order.truncate(config.top_k);
    }
    let softmax = |order: &[u32], temperature: f64| -> Vec<f64> {
        let max = logits[order[0] as usize];
        let weights = order.iter().map(|t| ((logits[*t as usize] - max) / temperature).exp());
        let weights: Vec<f64> = weights.collect();
        let sum: f64 = weights.iter().sum();
        weights.into_iter().map(|w| w / sum).collect()
    };
    let near = |a: f64, b: f64| (a - b).abs() < 1e-5;
    let mut uncertain = order.windows(2).any(|w| near(logits[w[0] as usize], logits[w[1] as usize]));
    // 3. top-p: the smallest set of most likely tokens that reaches it
    let p = softmax(&order, 1.0);
    if config.top_p < 1.0 {
        let mut sum = 0.0;
        let mut keep = 0;
        for p in &p {
            sum += p;
            keep += 1;
            uncertain |= near(sum, f64::from(config.top_p));
            if sum >= f64::from(config.top_p) {
                break;
            }
        }
        order.truncate(keep);
    }
    // 4. min-p, a share of the most likely token's probability
    let ratios: Vec<f64> = p.iter().map(|q| q / p[0]).collect();
    uncertain |= ratios.iter().any(|r| near(*r, f64::from(config.min_p)));
    let keep = ratios.iter().take(order.len()).filter(|r| **r >= f64::from(config.min_p)).count();
    order.truncate(keep.max(1));
    // 5. temperature; 0 picks the most likely token
    let kept = match config.temperature {
        0.0 => vec![(order[0], 1.0)],
        t => order.iter().copied().zip(softmax(&order, f64::from(t))).collect(),
    };
    Distribution { kept, uncertain }
}

fn random_config(n: &mut SplitMix64) -> SamplerConfig {
    SamplerConfig {
        temperature: n.pick(&[0.0, 0.3, 0.8, 1.0, 2.5]),
        top_k: n.pick(&[0, 0, 1, 2, 5, 1_000]),
        top_p: n.pick(&[1.0, 1.0, 0.95, 0.7, 0.3, 0.01]),
        min_p: n.pick(&[0.0, 0.0, 0.02, 0.2, 1.0]),
        repetition_penalty: n.pick(&[1.0, 1.0, 1.3, 0.7]),
        repetition_window: n.pick(&[0, 1, 3, 64, usize::MAX]),
        frequency_penalty: n.pick(&[0.0, 0.0, 0.4, 2.0, -0.7]),
        presence_penalty: n.pick(&[0.0, 0.0, 0.6, 2.0, -1.1]),
        seed: n.next(),
    }
}

#[test]
fn draws_what_the_twin_could_draw() {
    let mut certain = 0;
    for seed in 0..4_000u64 {
        let mut n = SplitMix64(seed);
        let config = random_config(&mut n);
        let vocab = 1 + n.index(24);
        let mut sampler = Sampler::new(config).unwrap();
        let mut text: Vec<u32> = Vec::new();
        for _ in 0..n.below(6) {
            let token = n.below(vocab as u32);
            text.push(token);
            sampler.observe(&[token]);
        }
        // Several draws in a row: penalties on drawn tokens start with the second.
        let mut drawn: Vec<u32> = Vec::new();
        for _ in 0..4 {
            let logits: Vec<f32> = (0..vocab).map(|_| (n.unit() * 12.0 - 6.0) as f32).collect();
            let reference = reference(&config, &logits, &text, &drawn);
            let token = sampler.sample(&logits).unwrap();
            sampler.observe(&[token]);
            if !reference.uncertain {
                certain += 1;
                let found = reference.kept.iter().find(|(t, _)| *t == token);
                let kept = &reference.kept;
                assert!(
                    found.is_some(),
                    "seed {seed}: {config:?} drew {token} of {logits:?} after {drawn:?}, kept {kept:?}"
                );
            }
            text.push(token);
            drawn.push(token);
        }
    }
    assert!(certain > 12_000, "{certain}");
}

/// Pearson's statistic of `draws` against `expected` must be below its mean plus six standard deviations.
#[test]
fn draws_are_distributed_as_the_twin_says() {
    const DRAWS: usize = 20_000;
    for seed in 0..24u64 {
        let mut n = SplitMix64(1_000 + seed);
        let config = SamplerConfig {
            temperature: n.pick(&[0.5, 1.0, 1.7]),
            // All draws are from one distribution: none affects the next.
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            ..random_config(&mut n)
        };
        let logits: Vec<f32> = (0..12).map(|_| (n.unit() * 5.0) as f32).collect();
        let text: Vec<u32> = (0..4).map(|_| n.below(12)).collect();
        let reference = reference(&config, &logits, &text, &[]);
        if reference.uncertain {
            continue;
        }
        let mut sampler = Sampler::new(config).unwrap();
        sampler.observe(&text);
        let mut counts = vec![0usize; logits.len()];
        for _ in 0..DRAWS {
            counts[sampler.sample(&logits).unwrap() as usize] += 1;
        }
        let mut statistic = 0.0;
        for (token, p) in &reference.kept {
            let expected = p * DRAWS as f64;
            statistic += (counts[*token as usize] as f64 - expected).powi(2) / expected.max(1.0);
            counts[*token as usize] = 0;
        }
        assert_eq!(counts.iter().sum::<usize>(), 0, "seed {seed}: {config:?} drew what was dropped");
        let freedom = (reference.kept.len() - 1) as f64;
        let bound = freedom + 6.0 * (2.0 * freedom).sqrt() + 1.0;
        assert!(statistic <= bound, "seed {seed}: {config:?}: {statistic} above {bound}");
    }
}

#[test]
fn the_same_seed_draws_the_same() {
    let config = SamplerConfig { temperature: 1.0, seed: 7, ..SamplerConfig::greedy() };
    let run = |config: SamplerConfig| -> Vec<u32> {
        let mut sampler = Sampler::new(config).unwrap();
        (0..64).map(|_| sampler.sample(&[0.0; 50]).unwrap()).collect()
    };
    assert_eq!(run(config), run(config));
    assert_ne!(run(config), run(SamplerConfig { seed: 8, ..config }));
}

#[test]
fn broken_logits_are_an_error() {
    for temperature in [0.0, 1.0] {
        let mut sampler = Sampler::new(SamplerConfig { temperature, ..SamplerConfig::greedy() }).unwrap();
        for logits in [&[f32::NAN][..], &[0.0, f32::NAN, 1.0], &[f32::NEG_INFINITY, f32::NAN]] {
            let error = sampler.sample(logits).unwrap_err().to_string();
            assert!(error.contains("NaN"), "{error}");
        }
        assert!(sampler.sample(&[]).is_err());
    }
}

/// Regression: rounding may leave a remainder of the sum, and the last candidate, which was then returned, had
/// probability 0.
#[test]
fn the_impossible_is_never_drawn() {
    for temperature in [0.0, 0.2, 1.0, 5.0] {
        for seed in 0..8 {
            let config = SamplerConfig { temperature, seed, ..SamplerConfig::greedy() };
            let mut sampler = Sampler::new(config).unwrap();
            let mut n = SplitMix64(seed);
            // Many small terms: summed forwards and backwards they differ slightly.
            let possible = 200;
            let logits: Vec<f32> = (0..possible)
                .map(|_| n.unit() as f32 * 3.0)
                .chain(std::iter::repeat_n(f32::NEG_INFINITY, 50))
                .collect();
            for _ in 0..4_000 {
                let token = sampler.sample(&logits).unwrap();
                assert!(token < possible, "temperature {temperature}, seed {seed} drew {token}");
            }
        }
    }
}

#[test]
fn extreme_logits_still_give_a_token() {
    let all = [
        vec![f32::NEG_INFINITY; 4],
        vec![f32::INFINITY; 4],
        vec![f32::MAX, f32::MIN, f32::INFINITY, f32::NEG_INFINITY],
        vec![0.0],
        vec![f32::NEG_INFINITY],
        vec![f32::MIN_POSITIVE, -0.0, 0.0],
    ];
    for logits in &all {
        for seed in 0..200u64 {
            let mut n = SplitMix64(seed);
            let temperature = n.pick(&[0.0, f32::MIN_POSITIVE, 1e-30, 1.0, 1e30, f32::MAX]);
            let repetition_penalty = n.pick(&[1.0, f32::MIN_POSITIVE, f32::MAX]);
            let frequency_penalty = n.pick(&[0.0, f32::MAX, f32::MIN]);
            let config =
                SamplerConfig { temperature, repetition_penalty, frequency_penalty, ..random_config(&mut n) };
            let mut sampler = Sampler::new(config).unwrap();
            // Tokens outside the vocabulary affect no logit.
            sampler.observe(&[0, 2, u32::MAX]);
            for _ in 0..3 {
                sampler.sample(logits).unwrap_or_else(|e| panic!("{config:?} of {logits:?}: {e}"));
            }
            let token = sampler.sample(logits).unwrap_or_else(|e| panic!("{config:?} of {logits:?}: {e}"));
            assert!((token as usize) < logits.len(), "{config:?} drew {token} of {logits:?}");
        }
    }
    // With one infinitely likely token, only that one is drawn.
    let mut sampler = Sampler::new(SamplerConfig { temperature: 1.0, ..SamplerConfig::greedy() }).unwrap();
    for _ in 0..100 {
        assert_eq!(sampler.sample(&all[2]).unwrap(), 2);
    }
}

#[test]
fn greedy_takes_the_first_of_the_largest() {
    let mut sampler = Sampler::new(SamplerConfig::greedy()).unwrap();
    for (logits, expected) in [(&[1.0, 3.0, 3.0][..], 1), (&[-1.0], 0), (&[f32::NEG_INFINITY, -9.0], 1)] {
        assert_eq!(sampler.sample(logits).unwrap(), expected, "{logits:?}");
    }
}

#[test]
fn parameters_that_mean_nothing_are_refused() {
    let good = SamplerConfig { temperature: 1.0, ..SamplerConfig::greedy() };
    let table = [
        (SamplerConfig { temperature: -0.1, ..good }, "temperature"),
        (SamplerConfig { temperature: f32::NAN, ..good }, "temperature"),
        (SamplerConfig { temperature: f32::INFINITY, ..good }, "temperature"),
        (SamplerConfig { top_p: 0.0, ..good }, "top-p"),
        (SamplerConfig { top_p: 1.1, ..good }, "top-p"),
        (SamplerConfig { top_p: f32::NAN, ..good }, "top-p"),
        (SamplerConfig { min_p: -0.1, ..good }, "min-p"),
        (SamplerConfig { min_p: 1.1, ..good }, "min-p"),
        (SamplerConfig { min_p: f32::NAN, ..good }, "min-p"),
        (SamplerConfig { repetition_penalty: 0.0, ..good }, "repetition"),
        (SamplerConfig { repetition_penalty: -1.0, ..good }, "repetition"),
        (SamplerConfig { repetition_penalty: f32::NAN, ..good }, "repetition"),
        (SamplerConfig { repetition_penalty: f32::INFINITY, ..good }, "repetition"),
        (SamplerConfig { frequency_penalty: f32::NAN, ..good }, "frequency"),
        (SamplerConfig { presence_penalty: f32::INFINITY, ..good }, "presence"),
    ];
    for (config, word) in table {
        let error = Sampler::new(config).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains(word), "{config:?}: {error}");
    }
}

/// The shown text does not depend on how the text is cut: it is everything before the stop string that is complete
/// first.
#[test]
fn stop_strings_do_not_depend_on_the_pieces() {
    for seed in 0..20_000u64 {
        let mut n = SplitMix64(seed);
        let letters = ['a', 'b', 'é', '日'];
        let mut word = |max: u32| -> String { (0..n.below(max)).map(|_| n.pick(&letters)).collect() };
        let text = word(14);
        let stops: Vec<String> = (0..3).map(|_| word(5)).collect();
        // By definition: the shortest prefix of the text that ends in a stop string; among several, the longest stop
        // string.
        let beginnings = (0..=text.len()).filter(|at| text.is_char_boundary(*at)).map(|at| &text[..at]);
        let found = beginnings.filter_map(|b| {
            let ending = stops.iter().filter(|s| !s.is_empty() && b.ends_with(s.as_str()));
            ending.max_by_key(|s| s.len()).map(|s| (b[..b.len() - s.len()].to_string(), Some(s.clone())))
        });
        let expected = found.into_iter().next().unwrap_or((text.clone(), None));

        let mut matcher = StopMatcher::new(&stops);
        let (mut out, mut stop, mut rest) = (String::new(), None, text.as_str());
        while stop.is_none() && !rest.is_empty() {
            let characters = 1 + n.index(4);
            let at = rest.char_indices().nth(characters).map_or(rest.len(), |(at, _)| at);
            let (piece, after) = rest.split_at(at);
            stop = matcher.push(piece, &mut out);
            assert!(expected.0.starts_with(&out), "seed {seed}: showed {out:?} of {expected:?}");
            rest = after;
        }
        if stop.is_none() {
            matcher.finish(&mut out);
        }
        assert_eq!((out, stop), expected, "seed {seed}: {stops:?} in {text:?}");
    }
}

/// What a device draws for a sampler is what the sampler draws itself. It needs the logits only for penalties.
#[test]
fn a_device_draws_the_same_tokens() {
    let mut random = SplitMix64(5);
    let base = SamplerConfig { temperature: 0.9, seed: 17, ..SamplerConfig::greedy() };
    for (config, needs_logits) in [
        (SamplerConfig::greedy(), false),
        (base, false),
        (SamplerConfig { top_k: 12, top_p: 0.8, min_p: 0.02, ..base }, false),
        (SamplerConfig { top_k: usize::MAX, ..base }, false),
        (SamplerConfig { repetition_penalty: 1.3, repetition_window: 8, ..base }, true),
        (SamplerConfig { presence_penalty: 0.5, ..SamplerConfig::greedy() }, true),
        (SamplerConfig { frequency_penalty: 0.5, ..base }, true),
    ] {
        let (mut host, mut device) = (Sampler::new(config).unwrap(), Sampler::new(config).unwrap());
        let mut output = StepOutput::default();
        for round in 0..200 {
            let mut logits: Vec<f32> = (0..70).map(|_| (random.next() % 64) as f32 * 0.125).collect();
            if round % 50 == 49 {
                logits[3] = f32::NAN;
            }
            let wanted = device.row_output();
            assert_eq!(wanted == RowOutput::Logits, needs_logits, "{config:?}");
            output.want(&[WantedRow { row: 0, output: wanted }]);
            output.all_logits(logits.len()).copy_from_slice(&logits);
            output.answer_rows();
            let text = |token: Result<u32, _>| token.map_err(|error: kvist_engine::Error| error.to_string());
            let token = text(host.sample(&logits));
            assert_eq!(text(device.take(output.rows().next().unwrap())), token, "{config:?}, round {round}");
            if let Ok(token) = token {
                host.observe(&[token]);
                device.observe(&[token]);
            }
        }
        let refused = device.take(RowResult::TopK(&[(1, 0.5)])).is_err();
        assert!(refused, "the most likely tokens are not a draw");
    }
}
