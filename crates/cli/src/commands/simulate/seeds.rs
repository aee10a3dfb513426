//! `kvist simulate --seeds N`: one setting over several generated loads. They differ only by chance; the intervals show
//! by how much.
use super::{Args, show};
use crate::{output, progress};
use kvist_simulator::report::{VERSION, over_seeds};
use kvist_simulator::statistics::Estimate;
use serde::Serialize;
use std::collections::BTreeMap;

#[derive(Serialize)]
struct OverSeeds {
    version: u32,
    load: String,
    first_seed: u64,
    seeds: u64,
    figures: BTreeMap<&'static str, Estimate>,
}

pub fn run(args: &Args, n_seeds: u64, quiet: bool) -> anyhow::Result<()> {
    let what = &args.what;
    let bar = progress::bar("runs", n_seeds, quiet);
    let (mut figures, mut load) = (Vec::new(), String::new());
    for i in 0..n_seeds {
        let seed = args.seed.wrapping_add(i);
        let requests = what.requests.get(seed)?.in_order_of_arrival();
        what.check(&requests.list)?;
        if i == 0 {
            if let Some(remark) = what.schedule.remark(&requests.list).filter(|_| !quiet) {
                output::note(&remark);
            }
            load.clone_from(&requests.name);
        }
        figures.extend(super::figures(what, &requests.list, &what.options(seed), seed)?);
        bar.inc(1);
    }
    bar.finish_and_clear();
    let figures = over_seeds(figures);
    if args.show.json {
        let over = OverSeeds { version: VERSION, load, first_seed: args.seed, seeds: n_seeds, figures };
        return output::show_json(&over);
    }
    output::show(&show::over_seeds(&load, n_seeds, &figures))
}
