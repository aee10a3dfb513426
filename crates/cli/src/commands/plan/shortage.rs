//! Errors when no cache fits: what is short, and what to change.
use super::candidates::{self, Asked, Candidate, Command, longest, smallest};
use super::ladder::LADDER;
use kvist_device::Bytes;

/// `packed_bytes`: the size of the weights as q8_0.
pub fn nothing_fits(asked: &Asked, packed_bytes: u64) -> anyhow::Error {
    let candidates = candidates::all(asked, LADDER);
    let mut advice: Vec<String> = shorter(asked).into_iter().collect();
    if packed_bytes < asked.weight_bytes {
        advice.push(format!("--weights q8_0 ({} of weights)", Bytes(packed_bytes)));
    }
    advice.push("a smaller model".into());
    let min = match smallest(candidates.iter(), Command::Run) {
        Some(min) => format!("the least is {} ({})", Bytes(min.total_bytes), min.flags()),
        None => "no kind of cache fits these flags".into(),
    };
    anyhow::anyhow!(
        "nothing fits: {min}, of which weights take {}; {} are available; try {}",
        Bytes(asked.weight_bytes),
        Bytes(asked.memory_bytes),
        advice.join(", ")
    )
}

/// The longest context that fits; with smaller steps, if that makes it longer.
fn shorter(asked: &Asked) -> Option<String> {
    let at = |chunk: u32| -> Option<(u32, Candidate)> {
        let candidates = candidates::all(&Asked { chunk, ..*asked }, LADDER);
        Some((chunk, longest(candidates.iter(), Command::Run)?.clone()))
    };
    // Of equal chunks max_by_key returns the last, which has the largest steps.
    let chunks = [16, 64, 256, asked.chunk].map(|chunk| chunk.min(asked.chunk));
    let (chunk, fits) = chunks.into_iter().filter_map(at).max_by_key(|(_, fits)| fits.useful_context())?;
    let chunk = (chunk < asked.chunk).then(|| format!(" --chunk {chunk}"));
    Some(format!("{} --context {}{}", fits.flags(), fits.useful_context(), chunk.unwrap_or_default()))
}
