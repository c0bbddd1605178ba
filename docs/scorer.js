// Order of the search's hits: an exact name of a setting, metric or preset, pages with the query in their title, other
// pages, names that contain the words, pages for contributors.
var Scorer = {
  score: ([page, title, , , score, , kind]) => {
    const query = new URLSearchParams(location.search).get("q").trim();
    if (kind === "object") return `/${title}`.endsWith(`/${query}`) ? 100 : score;
    const isTitle = title.toLowerCase().includes(query.toLowerCase());
    return score + (isTitle ? 5 : 0) - (/^reference\/api|^background\/arch/.test(page) ? 6 : 0);
  },
  objNameMatch: 11,
  objPartialMatch: -1,
  objPrio: { 1: 5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
