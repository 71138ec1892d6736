"use strict";
// Pages of one SVG of which one is shown: boxes with data-opens open another, Escape and the words
// at the top go back; arrow keys walk the boxes.
function zoomable(svg) {
  const pages = [...svg.querySelectorAll("[data-page]")];
  const name = (page) => page.getAttribute("data-page");
  const doors = (page) => [...page.querySelectorAll("[data-opens]")];
  let open = pages[0];
  for (const door of doors(svg)) {  // what is not here does not open
    if (pages.some((p) => name(p) === door.getAttribute("data-opens"))) continue;
    for (const word of ["data-opens", "tabindex", "role", "aria-label"]) door.removeAttribute(word);
  }

  function show(wanted, from) {
    const page = pages.find((p) => name(p) === wanted);
    if (!page) return;
    open = page;
    for (const p of pages) p.setAttribute("display", p === page ? "inline" : "none");
    const [width, height] = page.getAttribute("data-size").split(" ");
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("width", width);
    svg.setAttribute("height", height);
    const next = doors(page).find((d) => d.getAttribute("data-opens") === from) || doors(page)[0];
    if (next) next.focus({ preventScroll: true });
    if (svg.getBoundingClientRect().top < 0) svg.scrollIntoView();
  }
  const door = (event) => event.target.closest("[data-opens]");
  svg.addEventListener("click", (event) => {
    if (door(event)) show(door(event).getAttribute("data-opens"), name(open));
  });
  svg.addEventListener("keydown", (event) => {
    const at = door(event), all = doors(open);
    const step = { ArrowDown: 1, ArrowRight: 1, ArrowUp: -1, ArrowLeft: -1 }[event.key];
    const parent = open.getAttribute("data-parent");
    if (event.key === "Escape" && parent) show(parent, name(open));
    else if (at && (event.key === "Enter" || event.key === " ")) {
      show(at.getAttribute("data-opens"), name(open));
    } else if (at && step) all[(all.indexOf(at) + step + all.length) % all.length].focus();
    else return;
    event.preventDefault();
  });
}
