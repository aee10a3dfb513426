//! `kvist eval --speculate`: how many draft tokens are accepted, by their depth.
use super::{Args, tree};
use crate::continuations::Continuation;
use crate::options::*;
use crate::{interrupt, json, output, progress, scoring};
use anyhow::Context;
use kvist_engine::session::ModelSession;
use kvist_engine::speculate::{Counts, DraftTree, DraftedPass, Verified};
use serde::Serialize;
use std::path::PathBuf;

/// `kvist eval --speculate --json`
#[derive(Serialize)]
struct Report {
    version: u32,
    model: String,
    text: PathBuf,
    cache: json::CacheShape,
    /// The mode.
    speculate: String,
    prompts: u32,
    prompt_tokens: u32,
    /// Generated tokens, without the first one of each prompt, which no draft can propose.
    tokens: u64,
    tokens_per_pass: f64,
    speculation: Counts,
    depths: Vec<Depth>,
    /// True if not all prompts were continued.
    interrupted: bool,
}

/// The nodes at one depth of the drafts.
#[derive(Clone, Default, Serialize)]
struct Depth {
    /// 1 for the token after the last known one.
    depth: usize,
    drafted: u64,
    /// Passes in which the nodes before were accepted, and a node at this depth could be.
    reached: u64,
    /// Of these, passes in which one was.
    accepted: u64,
    /// Accepted over reached; null if none was reached.
    acceptance: Option<f64>,
}

#[derive(Default)]
struct Depths(Vec<Depth>);

impl Depths {
    fn record(&mut self, tree: &DraftTree, verified: &Verified) {
        let deepest = self.0.len().max(tree.max_depth() as usize);
        self.0.resize(deepest, Depth::default());
        for node in 0..tree.len() as u32 {
            self.0[tree.depth(node) as usize].drafted += 1;
        }
        let path = &verified.path;
        for depth in &mut self.0[..path.len()] {
            depth.reached += 1;
            depth.accepted += 1;
        }
        // Nothing is accepted after the last token of a continuation, so it says nothing about drafts.
        if !verified.finished && tree.parents().contains(&path.last().copied()) && !tree.is_empty() {
            self.0[path.len()].reached += 1;
        }
    }

    fn finish(mut self) -> Vec<Depth> {
        for (i, depth) in self.0.iter_mut().enumerate() {
            depth.depth = i + 1;
            depth.acceptance = (depth.reached > 0).then(|| depth.accepted as f64 / depth.reached as f64);
        }
        self.0
    }
}

pub fn run(args: &Args, quiet: bool) -> anyhow::Result<()> {
    let text = read_text(&args.text)?;
    let opened = args.model.open(quiet)?;
    let mut tokens = scoring::tokens(&opened, &text)?;
    if args.limit > 0 {
        tokens.truncate(args.limit);
    }
    let parts = args.parts.cut(&tokens)?;
    // Create the file first, so that an error comes before the work.
    let plot = args.plot.as_deref().map(output::FileInParts::create).transpose()?;
    let (speculation, needed) = (&args.speculation, args.parts.context(args.speculation.draft_tokens));
    if let Some(context) = args.cache.context.filter(|context| *context < needed) {
        return Err(wrong_usage(format!(
            "--context {context}: --prompt-tokens, --tokens and --draft-tokens need {needed}"
        )));
    }
    let mut config = args.cache.config(opened.config(), u64::from(needed))?;
    speculation.prepare(&mut config, args.cache.kind.as_deref(), args.cache.context)?;
    let draft = speculation.open_draft(&opened, &args.model, quiet)?;
    let min = args.parts.prompt_tokens as usize;
    let (model, _, draft) = speculation.load(&args.model, opened, draft, &config, min, quiet)?;
    let speculator = speculation.speculator(draft.as_ref(), &model, &config, 1)?;
    let mut speculator = speculator.context("a drafter was asked for")?;
    let mut session = ModelSession::new(&model, &registry(&args.model.compute.get()?), &config)?;
    interrupt::listen();
    let continuation =
        Continuation { tokens: args.parts.tokens as usize, follow: false, ends: model.end_tokens() };
    let bar = progress::bar("generating", u64::from(args.parts.prompts), quiet);
    let (mut depths, mut tokens) = (Depths::default(), 0);
    let mut shown = None;
    for (id, part) in (0..).zip(&parts) {
        let mut watch = |known: &[u32], pass: &DraftedPass| {
            depths.record(&pass.draft.tree, &pass.verified);
            tokens += pass.verified.tokens.len() as u64;
            if args.plot.is_some() {
                tree::Verification::keep_better(&mut shown, known, pass);
            }
            !interrupt::interrupted()
        };
        continuation.decode(&mut session, Some(&mut speculator), (id, part), &mut watch)?;
        bar.inc(1);
        if interrupt::interrupted() {
            break;
        }
    }
    bar.finish_and_clear();
    let speculation = speculator.counts().clone();
    let report = Report {
        version: json::VERSION,
        model: model.name().to_string(),
        text: args.text.clone(),
        cache: json::CacheShape::new(&config, model.config()),
        speculate: format!("{:?}", args.speculation.speculate).to_lowercase(),
        prompts: args.parts.prompts,
        prompt_tokens: args.parts.prompt_tokens,
        tokens,
        tokens_per_pass: tokens as f64 / speculation.target_passes.max(1) as f64,
        speculation,
        depths: depths.finish(),
        interrupted: interrupt::interrupted(),
    };
    if args.json {
        output::show_json(&report)?
    } else {
        output::show(&report.text())?
    }
    if let Some(mut plot) = plot {
        let shown = shown.context("--plot: nothing was drafted, so there is no tree to draw")?;
        let tokenizer = model.tokenizer().context("a text was encoded")?;
        plot.write(shown.svg(tokenizer)?.as_bytes())?;
        plot.finish()?;
    }
    Ok(())
}

impl Report {
    fn text(&self) -> String {
        let Counts { target_passes, drafted, accepted, .. } = self.speculation;
        let mut text = format!(
            "{}: {} tokens after {} prompts of {} tokens{}\n\
             {:.2} tokens per pass in {target_passes} passes, {accepted} of {drafted} draft tokens accepted\n\
             depth  drafted  reached  accepted\n",
            self.speculate,
            self.tokens,
            self.prompts,
            self.prompt_tokens,
            if self.interrupted { " (interrupted)" } else { "" },
            self.tokens_per_pass,
        );
        for Depth { depth, drafted, reached, accepted, acceptance } in &self.depths {
            let share = acceptance.map_or(String::new(), |share| format!("  {:.1} %", 100.0 * share));
            text += &format!("{depth:5}  {drafted:7}  {reached:7}  {accepted:8}{share}\n");
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn depths_are_counted_where_a_node_could_be_accepted() {
        // Two roots; the first one has two children.
        let mut tree = DraftTree::default();
        let root = tree.push(None, 1, 0.5);
        tree.push(None, 2, 0.4);
        let child = tree.push(Some(root), 3, 0.5);
        tree.push(Some(root), 4, 0.5);
        let mut depths = Depths::default();
        let mut pass = |path: &[u32], finished| {
            depths.record(&tree, &Verified { path: path.into(), tokens: vec![9; path.len() + 1], finished });
        };
        pass(&[], false); // no root was right
        pass(&[root, child], false); // all of a path
        pass(&[root], false); // no child was right
        pass(&[1], false); // the second root, which has no children
        pass(&[root], true); // the text ended after the root
        depths.record(&DraftTree::default(), &Verified { path: vec![], tokens: vec![9], finished: false });
        let depths = depths.finish();
        let found: Vec<_> = depths.iter().map(|d| (d.depth, d.drafted, d.reached, d.accepted)).collect();
        assert_eq!(found, [(1, 10, 5, 4), (2, 10, 2, 1)]);
        assert_eq!(depths[1].acceptance, Some(0.5));
    }
}
