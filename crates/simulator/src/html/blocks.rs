//! The block map: the state of every block at a moment the reader chooses.
use super::picture::section_of;
use super::{Run, escape};
use crate::report::{BlockFrame, BlockMap, BlockState};
use std::fmt::Write;

/// Maximum squares on a map. With more blocks, a square represents several and shows the first of them.
const MOST_SQUARES: u32 = 2048;
/// Maximum moments to choose from.
const MOST_FRAMES: usize = 120;

pub(super) fn section(runs: &[Run<'_>]) -> String {
    let mut maps = String::new();
    for run in runs {
        let Some(map) = run.record.block_map.as_ref().filter(|map| !map.frames().is_empty()) else {
            continue;
        };
        if runs.len() > 1 {
            let _ = write!(maps, "<h3>{}</h3>", escape(run.name));
        }
        maps += &widget(map);
    }
    if maps.is_empty() {
        return maps;
    }
    let about = "Every block, in the order of its number. A colour is a request; move the slider to travel in time, \
                 and the pointer over a square to ask whose it is.";
    let script = include_str!("blocks.js");
    section_of(
        "Block map",
        about,
        &format!("{maps}<noscript>The map needs JavaScript.</noscript>\n<script>\n{script}</script>"),
    )
}

fn widget(map: &BlockMap) -> String {
    let per_square = map.n_blocks.div_ceil(MOST_SQUARES).max(1);
    let every = map.frames().len().div_ceil(MOST_FRAMES).max(1);
    let begin_ns = map.frames().first().map_or(0, |frame| frame.at_ns);
    let mut data = format!("{{\"blocks\":{},\"per_square\":{per_square},\"frames\":[", map.n_blocks);
    for (i, frame) in map.frames().iter().step_by(every).enumerate() {
        if i > 0 {
            data.push(',');
        }
        let seconds = frame.at_ns.saturating_sub(begin_ns) as f64 / 1e9;
        let _ = write!(data, "[{seconds:.6},[{}]]", squares(frame, per_square));
    }
    data += "]}";
    format!(
        "<div class=\"blocks\"><canvas></canvas>\
         <div class=\"scrub\"><button type=\"button\" aria-label=\"play\">▶</button>\
         <input type=\"range\" min=\"0\" value=\"0\" aria-label=\"moment\"><output></output></div>\
         <p class=\"legend\"><span><i class=\"free\"></i>free <b></b></span><span><i class=\"cached\"></i>cached <b></b></span>\
         <span><i class=\"shared\"></i>shared <b></b></span><span><i class=\"held\"></i>held by one request <b></b></span></p>\
         <script type=\"application/json\">{data}</script></div>\n"
    )
}

/// Run-length encoded squares as `n,code,n,code,…`: 0 free, 1 cached, 2 shared, 3 + id for a block used by one
/// request.
fn squares(frame: &BlockFrame, per_square: u32) -> String {
    let mut runs: Vec<(u32, u64)> = Vec::new();
    let mut begin = 0u32;
    for (n, state) in &frame.runs {
        let end = begin + n;
        // Squares whose first block lies in begin..end.
        let squares = end.div_ceil(per_square) - begin.div_ceil(per_square);
        begin = end;
        let code = match state {
            BlockState::Free => 0,
            BlockState::Cached => 1,
            BlockState::Shared => 2,
            BlockState::Held(id) => id.saturating_add(3),
        };
        match runs.last_mut() {
            _ if squares == 0 => {}
            Some((n, last)) if *last == code => *n += squares,
            _ => runs.push((squares, code)),
        }
    }
    runs.iter().map(|(n, code)| format!("{n},{code}")).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn squares_show_their_first_block() {
        let frame = BlockFrame {
            at_ns: 0,
            runs: vec![
                (1, BlockState::Free),
                (2, BlockState::Held(4)),
                (3, BlockState::Cached),
                (1, BlockState::Shared),
            ],
        };
        assert_eq!(squares(&frame, 1), "1,0,2,7,3,1,1,2");
        assert_eq!(squares(&frame, 2), "1,0,1,7,1,1,1,2"); // blocks 0, 2, 4, 6
        assert_eq!(squares(&frame, 3), "1,0,1,1,1,2"); // blocks 0, 3, 6
        assert_eq!(squares(&frame, 100), "1,0");
    }
}
