//! Which experts tokens use: the tables that kernels write against ones made by the host.
use crate::common::{self, Api};
use kvist_gpu::{Args, Driver, Kernel};
use kvist_testing::operations::random;

/// The table of routed rows with these experts and weights, sorted, as `routes.wgsl` says.
pub fn table(experts: &[u32], weights: &[f32], n_experts: u32) -> Vec<u32> {
    let mut sorted: Vec<u32> = (0..experts.len() as u32).collect();
    sorted.sort_by_key(|row| (experts[*row as usize], *row));
    let before = |expert: u32| experts.iter().filter(|e| **e < expert).count() as u32;
    let weights = weights.iter().map(|weight| weight.to_bits()).collect();
    [experts.to_vec(), weights, (0..=n_experts).map(before).collect(), sorted].concat()
}

/// `used` experts of each token, ascending; of few tokens some experts have none.
pub fn experts(tokens: usize, used: usize, n_experts: usize, seed: u64) -> Vec<u32> {
    let odds = random(seed, tokens * n_experts, 1.0);
    let of_token = |odds: &[f32]| {
        let mut order: Vec<u32> = (0..n_experts as u32).collect();
        // Not every expert as often.
        order.sort_by(|a, b| {
            let odd = |e: u32| odds[e as usize] + if e == 1 { 0.7 } else { 0.0 };
            odd(*b).total_cmp(&odd(*a))
        });
        order.truncate(used);
        order.sort_unstable();
        order
    };
    odds.chunks_exact(n_experts).flat_map(of_token).collect()
}

/// Such a table on the device, whose weights are 1.
pub fn table_on(gpu: &Api, experts: &[u32], n_experts: usize) -> <Api as Driver>::Buffer {
    let table = table(experts, &vec![1.0; experts.len()], n_experts as u32);
    gpu.filled("routes", &words(&table)).unwrap()
}

fn words(values: &[u32]) -> Vec<u8> {
    values.iter().flat_map(|x| x.to_le_bytes()).collect()
}

/// The first `n` words of a buffer.
pub fn read(gpu: &Api, buffer: &<Api as Driver>::Buffer, n: usize) -> Vec<u32> {
    let mut found = Vec::new();
    gpu.read_back(&[(buffer, 0, 4 * n as u64)], |bytes| {
        found = bytes.as_chunks().0.iter().map(|x| u32::from_le_bytes(*x)).collect();
    })
    .unwrap();
    found
}

/// Words behind a table.
const BEHIND: usize = 5;

#[test]
fn rows_are_sorted_by_expert() {
    let Some(device) = common::device() else { return };
    let gpu = device.driver();
    for (tokens, used, n_experts) in
        [(1, 1, 1), (1, 2, 7), (9, 2, 3), (300, 4, 32), (70, 8, 128), (1111, 2, 5)]
    {
        let experts = experts(tokens, used, n_experts, 3);
        let weights = random(4, experts.len(), 1.0);
        let mut expected = table(&experts, &weights, n_experts as u32);
        let mut before = expected.clone();
        before[2 * experts.len()..].fill(0xffff_ffff);
        expected.extend([0xdead_beef; BEHIND]);
        before.extend([0xdead_beef; BEHIND]);
        let buffer = gpu.filled("routes", &words(&before)).unwrap();
        let mut recorder = Default::default();
        let args = Args::new(&[experts.len() as u32, n_experts as u32]);
        gpu.record(&mut recorder, &Kernel::Sort, &[Some(&buffer)], args, [n_experts as u32, 1, 1]);
        gpu.wait(&gpu.submit(&mut recorder, &[])).unwrap();
        let found = read(gpu, &buffer, expected.len());
        assert_eq!(found, expected, "{used} of {n_experts} for each of {tokens}");
    }
}

#[test]
fn tokens_use_their_likeliest_experts() {
    let Some(device) = common::device() else { return };
    let gpu = device.driver();
    // More than a workgroup has invocations, and than it keeps.
    for (tokens, used, n_experts) in [(1, 1, 1), (5, 2, 8), (3, 4, 32), (2, 8, 128), (3, 7, 200), (2, 5, 600)]
    {
        for renormalise in [false, true] {
            let mut odds = random(7, tokens * n_experts, 3.0);
            // Of equal ones the first.
            odds.iter_mut().for_each(|odd| *odd = (*odd * 4.0).round() / 4.0);
            let rows = tokens * used;
            let buffer =
                gpu.filled("odds", &odds.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>()).unwrap();
            let routes = gpu.filled("routes", &words(&vec![0xffff_ffff; 2 * rows + BEHIND])).unwrap();
            let mut recorder = Default::default();
            let args = Args::new(&[tokens as u32, n_experts as u32, used as u32, u32::from(renormalise)]);
            let buffers = [Some(&buffer), Some(&routes)];
            gpu.record(&mut recorder, &Kernel::Route, &buffers, args, [tokens as u32, 1, 1]);
            gpu.wait(&gpu.submit(&mut recorder, &[])).unwrap();
            let found = read(gpu, &routes, 2 * rows + BEHIND);
            for (t, odds) in odds.chunks_exact(n_experts).enumerate() {
                let what = format!("{used} of {n_experts}, token {t} of {tokens}");
                let mut order: Vec<usize> = (0..n_experts).collect();
                order.sort_by(|a, b| odds[*b].total_cmp(&odds[*a]).then(a.cmp(b)));
                order.truncate(used);
                order.sort_unstable();
                let p = |e: &usize| f64::from(odds[*e]).exp();
                let sum: f64 =
                    if renormalise { order.iter().map(p).sum() } else { (0..n_experts).map(|e| p(&e)).sum() };
                for (i, expert) in order.iter().enumerate() {
                    let row = t * used + i;
                    assert_eq!(found[row] as usize, *expert, "{what}");
                    let (weight, expected) = (f64::from(f32::from_bits(found[rows + row])), p(expert) / sum);
                    assert!((weight - expected).abs() <= 1e-5 * expected, "{what}: {weight}, not {expected}");
                }
            }
            assert!(found[2 * rows..].iter().all(|word| *word == 0xffff_ffff), "behind the table");
        }
    }
}

/// Odds that are not numbers must not lead out of a table.
#[test]
fn what_is_not_a_number_stays_in_its_place() {
    let Some(device) = common::device() else { return };
    let gpu = device.driver();
    let (n_experts, used) = (9usize, 2usize);
    let mut odds = random(7, 3 * n_experts, 3.0);
    odds[n_experts..2 * n_experts].fill(f32::NAN);
    let buffer = gpu.filled("odds", &odds.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>()).unwrap();
    let rows = 3 * used;
    let routes = gpu.filled("routes", &words(&vec![0xffff_ffff; 2 * rows + BEHIND])).unwrap();
    let mut recorder = Default::default();
    let args = Args::new(&[3, n_experts as u32, used as u32, 1]);
    gpu.record(&mut recorder, &Kernel::Route, &[Some(&buffer), Some(&routes)], args, [3, 1, 1]);
    gpu.wait(&gpu.submit(&mut recorder, &[])).unwrap();
    let found = read(gpu, &routes, 2 * rows + BEHIND);
    assert!(found[..rows].iter().all(|expert| *expert < n_experts as u32), "{found:?}");
    let weight = |row: usize| f32::from_bits(found[rows + row]);
    assert!((0..rows).all(|row| weight(row).is_finite() != (2..4).contains(&row)), "{found:?}");
    assert!(found[2 * rows..].iter().all(|word| *word == 0xffff_ffff), "behind the table");
}
